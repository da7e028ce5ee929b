#include "plane.h"

#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace rvdcomm {
namespace {

// Runs of up to this many bytes are copied inline: a call of memcpy costs more than it saves.
constexpr int64_t kInlineBytes = 512;

template <int kBytes>
inline void copy_fixed(char* dst, const char* src) {
  char bytes[kBytes];
  memcpy(bytes, src, kBytes);
  memcpy(dst, bytes, kBytes);
}

/// Copy the first and the last kBytes of a run. The two copies may overlap.
/// @pre kBytes <= count <= 2 * kBytes
template <int kBytes>
inline void copy_ends(char* dst, const char* src, int64_t count) {
  char head[kBytes], tail[kBytes];
  memcpy(head, src, kBytes);
  memcpy(tail, src + count - kBytes, kBytes);
  memcpy(dst, head, kBytes);
  memcpy(dst + count - kBytes, tail, kBytes);
}

inline void copy_run(char* dst, const char* src, int64_t count) {
  if (count > kInlineBytes) {
    memcpy(dst, src, static_cast<size_t>(count));
  } else if (count >= 64) {
    for (int64_t i = 0; i + 64 < count; i += 64) copy_fixed<64>(dst + i, src + i);
    copy_fixed<64>(dst + count - 64, src + count - 64);
  } else if (count >= 32) {
    copy_ends<32>(dst, src, count);
  } else if (count >= 16) {
    copy_ends<16>(dst, src, count);
  } else if (count >= 8) {
    copy_ends<8>(dst, src, count);
  } else if (count >= 4) {
    copy_ends<4>(dst, src, count);
  } else if (count >= 2) {
    copy_ends<2>(dst, src, count);
  } else if (count == 1) {
    *dst = *src;
  }
}

template <int64_t kBytes>
void copy_fixed_plane(char* dst, const char* src, const Plane& plane) {
  for (int64_t row = 0; row < plane.rows; ++row) {
    char* d = dst + row * plane.dst_row;
    const char* s = src + row * plane.src_row;
    for (int64_t col = 0; col < plane.cols; ++col) {
      copy_fixed<kBytes>(d, s);
      d += plane.dst_col;
      s += plane.src_col;
    }
  }
}

void copy_any_plane(char* dst, const char* src, const Plane& plane) {
  for (int64_t row = 0; row < plane.rows; ++row) {
    char* d = dst + row * plane.dst_row;
    const char* s = src + row * plane.src_row;
    for (int64_t col = 0; col < plane.cols; ++col) {
      copy_run(d, s, plane.run_bytes);
      d += plane.dst_col;
      s += plane.src_col;
    }
  }
}

// Distance of the software prefetch. At some 10 GB/s, 2 KiB take 200 ns, which is twice the latency
// of memory. The hardware prefetcher follows the lines of a run, but cannot predict the next run.
constexpr int64_t kAheadBytes = 2 << 10;

#if defined(__SSE2__)
/// Copy every run with streamed stores. A run has kBytes, or plane.run_bytes if kBytes is 0.
template <int64_t kBytes>
void stream_runs(char* dst, const char* src, const Plane& plane) {
  const int64_t count = kBytes != 0 ? kBytes : plane.run_bytes;
  const int64_t ahead = (kAheadBytes + count - 1) / count * plane.src_col;
  for (int64_t row = 0; row < plane.rows; ++row) {
    char* d = dst + row * plane.dst_row;
    const char* s = src + row * plane.src_row;
    for (int64_t col = 0; col < plane.cols; ++col) {
      for (int64_t i = 0; i < count; i += 64) _mm_prefetch(s + ahead + i, _MM_HINT_T0);
      for (int64_t i = 0; i < count; i += kStreamAlign) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(d + i),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(s + i)));
      }
      d += plane.dst_col;
      s += plane.src_col;
    }
  }
}
#endif

}  // namespace

PlaneFn copy_plane(int64_t run_bytes) {
  switch (run_bytes) {
    case 1: return copy_fixed_plane<1>;
    case 2: return copy_fixed_plane<2>;
    case 4: return copy_fixed_plane<4>;
    case 8: return copy_fixed_plane<8>;
    case 16: return copy_fixed_plane<16>;
    case 32: return copy_fixed_plane<32>;
    case 64: return copy_fixed_plane<64>;
    case 128: return copy_fixed_plane<128>;
    default: return copy_any_plane;
  }
}

#if defined(__SSE2__)
PlaneFn stream_plane(int64_t run_bytes) {
  switch (run_bytes) {
    case 16: return stream_runs<16>;
    case 32: return stream_runs<32>;
    case 64: return stream_runs<64>;
    case 128: return stream_runs<128>;
    default: return stream_runs<0>;
  }
}

void stream_fence() { _mm_sfence(); }
#else
PlaneFn stream_plane(int64_t) { return nullptr; }

void stream_fence() {}
#endif

void zero_plane(char* dst, const char*, const Plane& plane) {
  for (int64_t row = 0; row < plane.rows; ++row) {
    for (int64_t col = 0; col < plane.cols; ++col) {
      memset(dst + row * plane.dst_row + col * plane.dst_col, 0,
             static_cast<size_t>(plane.run_bytes));
    }
  }
}

}  // namespace rvdcomm
