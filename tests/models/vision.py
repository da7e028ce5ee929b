"""Tiny models, most of them for images or sequences, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.models.libraries import timm

BATCH = 4
CLASSES = 3


class Classifier(nn.Module):
    """A body, a pooling of its result, a linear layer, and a cross entropy."""

    def __init__(self, body: nn.Module, pool: Callable[[Any], Tensor] = lambda y: y) -> None:
        super().__init__()
        self.body, self.pool = body, pool
        self.head = nn.LazyLinear(CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.pool(self.body(x)).flatten(1)), labels)


class TimmModel(nn.Module):
    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        made = timm.create_model(name, num_classes=CLASSES, **options)
        self.body = timm.layers.convert_sync_batchnorm(made)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.body(x), labels)


class Convolutions(nn.Module):
    """Transposed convolution, fold, pixel shuffle, resizing, grid sampling, and several norms."""

    def __init__(self) -> None:
        super().__init__()
        self.down = parametrizations.weight_norm(nn.Conv2d(3, 8, 3, stride=2, padding=1))
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.norms = nn.ModuleList(
            [
                nn.SyncBatchNorm(4),
                nn.GroupNorm(2, 4),
                nn.InstanceNorm2d(4, affine=True),
                nn.InstanceNorm2d(4, track_running_stats=True),
            ]
        )
        self.prelu = nn.PReLU(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.prelu(self.up(self.down(x)))
        for norm in self.norms:
            x = norm(x)
        size = x.shape[-2:]
        x = F.fold(F.unfold(x, 3, padding=1).tanh(), size, 3, padding=1)
        x = F.pixel_shuffle(x, 2)
        x = F.interpolate(x, scale_factor=0.5, mode="bicubic")
        grid = torch.stack(torch.meshgrid(*[torch.linspace(-1, 1, 5)] * 2, indexing="xy"), -1)
        grid = grid.to(x.dtype).expand(len(x), 5, 5, 2)
        return F.adaptive_max_pool2d(F.grid_sample(x, grid, align_corners=False), 2)


class Spectrum(nn.Module):
    """Filters in the frequency domain, and a rotation of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.linspace(0.5, 1.5, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.fft.ifft2(torch.fft.fft2(x).conj() * 1j).imag
        y = torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=x.shape[-1])
        pairs = torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(y[..., ::2]), y[..., ::2]))
        return turned.flatten(-2).cumsum(1)


class Writes(nn.Module):
    """Assignments to slices, masked fills, and additions at indices."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.line(x)
        made = torch.zeros(*h.shape[:-1], 8, dtype=h.dtype)
        made[..., 1:7] = h
        made[:, 0] += x.mean()
        made.masked_fill_(made > 1, 1.0)
        return made.index_add(2, torch.tensor([0, 3]), h[..., :2])


class Penalized(nn.Module):
    """A loss with the squares of all weights, and a concatenation with an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.blocks(x.mean(1))
        h = torch.cat([h[:, :0], h], 1)
        return F.cross_entropy(h, labels) + 0.1 * sum(p.pow(2).sum() for p in self.parameters())


class Noise(nn.Module):
    """Random ops: noise, drop path, dropped channels, and dropout between the layers of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.lstm = nn.Linear(6, 6), nn.LSTM(6, 6, 2, batch_first=True, dropout=0.4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.lstm(self.line(x + 0.1 * torch.randn_like(x)))[0]
        kept = h.new_empty(len(h), 1, 1).bernoulli_(0.8).div_(0.8)
        h = F.dropout2d(h * kept, 0.3) * torch.rand(6, dtype=h.dtype)
        return F.cross_entropy(h.mean(1), labels)


class Divergence(nn.Module):
    """Several losses in addition to the cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 6)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h, x = self.line(x.mean(1)), x.mean(1)
        loss = F.kl_div(h.log_softmax(-1), x.softmax(-1), reduction="batchmean")
        loss = loss + F.cosine_embedding_loss(h, x, 2.0 * (labels > 0) - 1)
        loss = loss + F.gaussian_nll_loss(h, x, x.square() + 0.1) + F.pairwise_distance(h, x).sum()
        wanted, weight = F.glu(x).sigmoid(), torch.arange(1.0, 4).to(h.dtype)
        loss = loss + F.binary_cross_entropy_with_logits(F.glu(h), wanted, pos_weight=weight)
        return loss + F.cross_entropy(h, labels, weight=torch.arange(1.0, 7).to(h.dtype))


class Packed(nn.Module):
    """A recurrent layer over packed sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(6, 5, 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        made = self.gru(packed)[0]
        return pad_packed_sequence(made, batch_first=True, total_length=x.shape[1])[0]


class Lengths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.packed = Packed()

    def forward(self, x: Tensor) -> Tensor:
        return self.packed(x.tanh(), 4 + x[:, 0, 0].round().clamp(-2, 2).long())


class Bags(nn.Module):
    """Embedding bags (means, weighted sums, and bags of different sizes), and a CTC loss."""

    def __init__(self) -> None:
        super().__init__()
        self.means, self.sums = (
            nn.EmbeddingBag(7, 6, mode=mode, padding_idx=1) for mode in ("mean", "sum")
        )
        self.line, self.scores = nn.Linear(6, 6), nn.Linear(6, CLASSES + 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        ids = (10 * x).long() % 7
        h = self.means(ids.flatten(0, 1)) + self.sums(ids.flatten(0, 1), None, x.flatten(0, 1))
        h = torch.tanh(self.line(h.view(x.shape)))
        numbers = torch.arange(len(x))
        starts = torch.where(numbers > 0, 6 * numbers + labels, 0)
        h = h + self.means(ids[:, 0].flatten(), starts)[:, None]
        scores = self.scores(h).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((len(x),), 7)
        return nn.CTCLoss()(scores, torch.stack([labels, labels], 1) + 1, lengths, labels % 2 + 1)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    **{
        name: (lambda name=name: TimmModel(name), (3, 32, 32))
        for name in ("test_resnet", "test_efficientnet", "test_convnext", "test_byobnet")
    },
    "resnet10t": (lambda: TimmModel("resnet10t"), (3, 32, 32)),
    "convolutions": (lambda: Classifier(Convolutions()), (3, 8, 8)),
    "lstm": (
        lambda: Classifier(
            nn.LSTM(6, 5, 2, batch_first=True, bidirectional=True), lambda y: y[0].mean(1)
        ),
        (7, 6),
    ),
    # Dropout with probability 1 is not random.
    "dropped lstm": (
        lambda: Classifier(
            nn.LSTM(6, 5, 3, batch_first=True, bidirectional=True, dropout=1.0),
            lambda y: y[0].mean(1) + y[1][0].sum(0).tile(2) + y[1][1].sum(0).tile(2),
        ),
        (7, 6),
    ),
    "gru": (lambda: Classifier(nn.GRU(6, 5, 2, batch_first=True), lambda y: y[0][:, -1]), (7, 6)),
    "spectrum": (lambda: Classifier(Spectrum()), (7, 6)),
    "writes": (lambda: Classifier(Writes()), (7, 6)),
    "penalized": (Penalized, (7, 6)),
    "divergence": (Divergence, (7, 6)),
    "packed": (lambda: Classifier(Lengths()), (7, 6)),
    "bags": (Bags, (7, 6)),
    "noise": (Noise, (7, 6)),
}
"""By name: a function that makes the model, and the shape of one example."""


def made(name: str) -> nn.Module:
    """A model in float64, with the same random weights every time."""
    torch.manual_seed(3)
    model = MODELS[name][0]().double()
    if any(isinstance(module, nn.LazyLinear) for module in model.modules()):
        model.eval()(*batch(name, 0, 1))
    return model.train()


def batch(name: str, step: int, num_microbatches: int) -> tuple[Tensor, Tensor]:
    """The batch of a step, with all microbatches."""
    generator = torch.Generator().manual_seed(step)
    size = BATCH * num_microbatches
    x = torch.randn(size, *MODELS[name][1], dtype=torch.float64, generator=generator)
    return x, torch.randint(CLASSES, (size,), generator=generator)
