#include "rvdcomm/signal.h"

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <new>
#include <string>
#include <system_error>
#include <utility>

namespace rvdcomm {
namespace {

using Clock = std::chrono::steady_clock;
using Secs = std::chrono::duration<double>;

// Length of one futex wait; a wait checks for failures before it and for a dead peer after it. A
// dead peer wakes nobody, and the wake-up of a failure may come just before the futex wait begins.
// Both are noticed after one slice.
constexpr double kSliceSecs = 0.05;

// Before its first futex wait, a wait spins for kLooksPerYield reads of the condition and yields
// the core, in turns, for this time. The yields matter where ranks share a core: a spin without
// yields keeps the peer from counting the event. A barrier of 2, 4, 8 processes on 2 cores takes
// (medians) 4, 8, 17 us with spins and yields; 5, 36, 65 us with a futex wait at once; 0.1, 85, 280
// us with spins only.
constexpr double kAwakeSecs = 50e-6;
constexpr int kLooksPerYield = 32;
// If another program computes on the core, a yield returns after the time slice of that program,
// some ms later. After a yield of more than kLateYieldSecs, the next kWaitsAfterLateYield waits use
// the futex without yields, because the scheduler runs a thread soon after a futex wake-up.
constexpr double kLateYieldSecs = 500e-6;
constexpr int kWaitsAfterLateYield = 256;
// Largest timeout, about 32 years; it keeps the deadline finite if the caller passes infinity.
constexpr double kForeverSecs = 1e9;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

/// The digest of the calls with digest `history`, followed by call `next`. SplitMix64 mixes the
/// bits. The result is never 0, which stands for "no call".
uint64_t joined(uint64_t history, uint64_t next) {
  uint64_t z = history + 0x9e37'79b9'7f4a'7c15 * (next + 1);  // A bijection of `next`.
  z = (z ^ (z >> 30)) * 0xbf58'476d'1ce4'e5b9;
  z = (z ^ (z >> 27)) * 0x94d0'49bb'1331'11eb;
  return (z ^ (z >> 31)) | 1;
}

/// Whether a counter that reads `seen` has reached `count`. Counts wrap modulo 2^32, so this holds
/// if `seen` is less than 2^31 ahead of `count`.
bool is_reached(uint32_t seen, uint32_t count) { return static_cast<int32_t>(seen - count) >= 0; }

// --- futex --------------------------------------------------------------------------------------

/// Not FUTEX_PRIVATE: processes share the word, each at a different address.
long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, timeout, nullptr,
                 0);
}

void wake_all(std::atomic<uint32_t>& word) { futex(word, FUTEX_WAKE, INT_MAX, nullptr); }

enum class Sleep { kWoken, kWholeSlice, kInterrupted };

/// Futex wait while `word` is `seen`, until a wake-up or for `secs`.
Sleep sleep_on(std::atomic<uint32_t>& word, uint32_t seen, double secs) {
  timespec timeout{};
  timeout.tv_sec = static_cast<time_t>(secs);
  timeout.tv_nsec = static_cast<long>((secs - static_cast<double>(timeout.tv_sec)) * 1e9);
  if (futex(word, FUTEX_WAIT, seen, &timeout) == 0 || errno == EAGAIN) return Sleep::kWoken;
  if (errno == ETIMEDOUT) return Sleep::kWholeSlice;
  if (errno == EINTR) return Sleep::kInterrupted;
  throw std::system_error(errno, std::generic_category(), "futex wait on a peer's count");
}

// --- failures -----------------------------------------------------------------------------------

// Fault and rank are packed into one word, so that a reader never gets a fault without its rank.
constexpr uint32_t kRankBits = 24;

uint32_t pack(Fault fault, int rank) {
  return static_cast<uint32_t>(fault) << kRankBits | static_cast<uint32_t>(rank);
}

Fault fault_of(uint32_t failure) { return static_cast<Fault>(failure >> kRankBits); }

int rank_of(uint32_t failure) { return static_cast<int>(failure & ((1U << kRankBits) - 1)); }

std::string text_of(Fault fault, int rank) {
  const std::string name = "rank " + std::to_string(rank) + " of the domain ";
  switch (fault) {
    case Fault::kDead: return name + "is dead";
    case Fault::kTimeout: return name + "did not come in time";
    case Fault::kElsewhere: return name + "is in another call";
    default: return name + "failed";
  }
}

/// Marks this rank as a sleeper on a peer. The peer then makes a futex wake-up when it counts, and
/// other ranks read from `waits_for` which rank this one waits for.
class Asleep {
 public:
  Asleep(SignalHeader& own, SignalHeader& peer, size_t peer_rank) : own_(own), peer_(peer) {
    own_.waits_for = static_cast<uint32_t>(peer_rank) + 1;
    // This and `advance` are sequentially consistent. The sleeper increments `num_sleepers` and
    // then reads `count`; `advance` increments `count` and then reads `num_sleepers`. So either the
    // sleeper reads the new count, or `advance` sees the sleeper and wakes it.
    peer_.num_sleepers.fetch_add(1);
  }
  ~Asleep() {
    peer_.num_sleepers.fetch_sub(1);
    own_.waits_for = 0;
  }
  Asleep(const Asleep&) = delete;
  Asleep& operator=(const Asleep&) = delete;

 private:
  SignalHeader& own_;
  SignalHeader& peer_;
};

}  // namespace

PeerError::PeerError(Fault f, int r) : std::runtime_error(text_of(f, r)), fault(f), rank(r) {}

Signals::Signals(int self, std::vector<SignalHeader*> headers, std::vector<int> lifelines)
    : self_(static_cast<size_t>(self)),
      headers_(std::move(headers)),
      lifelines_(std::move(lifelines)),
      at_start_(headers_.size(), 0) {
  if (headers_.size() != lifelines_.size()) {
    throw std::invalid_argument(std::to_string(headers_.size()) + " headers were given and " +
                                std::to_string(lifelines_.size()) +
                                " lifelines; every rank has one of each.");
  }
  check_rank(self);
  for (size_t rank = 0; rank < headers_.size(); ++rank) {
    const uint64_t format = headers_[rank]->format;
    if (format != SignalHeader::kFormat) {
      throw std::invalid_argument("the header of rank " + std::to_string(rank) +
                                  " of the domain has format " + std::to_string(format) +
                                  ", this rank's is " + std::to_string(SignalHeader::kFormat) +
                                  "; all ranks must run one version of rvdcomm.");
    }
  }
}

void Signals::format(void* address) { new (address) SignalHeader; }

void Signals::advance() {
  check_open();
  own().count.fetch_add(1);
  if (own().num_sleepers != 0) wake_all(own().count);
}

uint32_t Signals::count() const { return own().count; }

void Signals::begin(uint64_t identity, uint64_t location, double timeout_secs,
                    const Hook& between_slices) {
  check_open();
  check();
  const uint64_t number = own().num_calls + 1;
  // A peer in call c reads this rank's slots of calls c (`wait`, `location`) and c - 1 (`wait` for
  // 0 events). This call overwrites the slot of call number - kNumKept. So every peer must first
  // have begun call number - kNumKept + 2.
  if (number >= SignalHeader::kNumKept) {
    for (size_t peer = 0; peer < headers_.size(); ++peer) {
      const SignalHeader& header = *headers_[peer];
      const auto is_near = [&] { return header.num_calls + SignalHeader::kNumKept >= number + 2; };
      if (peer != self_) wait_until(peer, timeout_secs, between_slices, is_near);
    }
  }
  const uint64_t history = own().history[(number - 1) % SignalHeader::kNumKept];
  own().history[number % SignalHeader::kNumKept] = joined(history, identity);
  own().locations[number % SignalHeader::kNumKept] = location;
  own().num_calls = number;
  advance();  // Wakes ranks that wait for `num_calls` of this rank.
}

uint64_t Signals::location(int peer, double timeout_secs, const Hook& between_slices) {
  check_open();
  check_rank(peer);
  const auto rank = static_cast<size_t>(peer);
  const uint64_t number = own().num_calls;
  if (rank != self_) {
    wait_until(rank, timeout_secs, between_slices, [&] {
      if (headers_[rank]->num_calls < number) return false;
      if (!shares_history(rank, number)) blame(Fault::kElsewhere, peer);
      return true;
    });
  }
  return headers_[rank]->locations[number % SignalHeader::kNumKept];
}

void Signals::end(const std::vector<uint32_t>& num_events) {
  if (num_events.size() != headers_.size()) {
    throw std::invalid_argument("a domain of " + std::to_string(headers_.size()) +
                                " ranks needs as many numbers of events, not " +
                                std::to_string(num_events.size()) + ".");
  }
  // The data that this call read are valid if no rank had failed when the last read was done. The
  // fence keeps the reads of `failure` behind the reads of the data.
  std::atomic_thread_fence(std::memory_order_acquire);
  check();
  for (size_t i = 0; i < num_events.size(); ++i) at_start_[i] += 1 + num_events[i];
}

void Signals::wait(int peer, uint32_t num_events, double timeout_secs, const Hook& between_slices) {
  check_open();
  check_rank(peer);
  if (own().failure != 0) check();
  const auto rank = static_cast<size_t>(peer);
  const SignalHeader& header = *headers_[rank];
  const uint64_t present = own().num_calls;
  // `begin` counts one event, which comes before the events of the present call.
  const bool is_present = num_events > 0 && present > 0;
  const uint64_t number = num_events > 0 || present == 0 ? present : present - 1;
  const uint32_t count = at_start_[rank] + num_events + (is_present ? 1 : 0);
  wait_until(rank, timeout_secs, between_slices, [&] {
    if (is_reached(header.count.load(std::memory_order_acquire), count)) {
      if (!shares_history(rank, number)) blame(Fault::kElsewhere, peer);
      return true;
    }
    if (header.num_calls >= number && !shares_history(rank, number)) {
      blame(Fault::kElsewhere, peer);
    }
    return false;
  });
}

/// Return once `is_met()` is true. The futex wait is on the count of `peer`, so a write that makes
/// the condition true must come before an increment of that count.
template <typename Condition>
void Signals::wait_until(size_t peer, double timeout_secs, const Hook& hook,
                         const Condition& is_met) {
  if (look_for(is_met)) return;
  SignalHeader& header = *headers_[peer];
  const auto deadline = Clock::now() + Secs(std::clamp(timeout_secs, 0.0, kForeverSecs));
  const Asleep asleep(own(), header, peer);
  while (true) {
    const uint32_t seen = header.count;
    if (is_met()) return;
    check_open();
    check();
    const double left = Secs(deadline - Clock::now()).count();
    if (left <= 0) blame(Fault::kTimeout, latest_of(peer));
    const Sleep sleep = sleep_on(header.count, seen, std::min(left, kSliceSecs));
    if (sleep == Sleep::kWoken) continue;
    if (hook) {
      try {
        hook();
      } catch (...) {
        fail();
        throw;
      }
    }
    // A peer that has closed its domain may have counted all events before, so test once more.
    if (has_hung_up(peer) && !is_met()) {
      check_open();  // This rank may have closed the lifeline itself.
      blame(Fault::kDead, static_cast<int>(peer));
    }
  }
}

/// Whether `peer` and this rank have the same digest of their calls 1 to `number`.
bool Signals::shares_history(size_t peer, uint64_t number) const {
  const size_t slot = number % SignalHeader::kNumKept;
  return headers_[peer]->history[slot] == own().history[slot];
}

void Signals::fail() { record(Fault::kFailed, static_cast<int>(self_)); }

void Signals::check() {
  // This rank's header is read first, so that a rank always throws the failure that it threw first.
  for (size_t i = 0; i < headers_.size(); ++i) {
    const size_t rank = (self_ + i) % headers_.size();
    const uint32_t failure = headers_[rank]->failure;
    if (failure == 0) continue;
    // Copy `failure` from the header of `rank` to this rank's header. Peers may read this rank's
    // header before the header of `rank`, and must find the same cause in it. Without the copy, a
    // later `fail` of this rank would write this rank as the cause into its header.
    record(fault_of(failure), rank_of(failure));
    throw PeerError(fault_of(failure), rank_of(failure));
  }
}

void Signals::blame(Fault fault, int peer) {
  check_rank(peer);
  // If `peer` gave up because of a third rank, it recorded that rank in its header before it threw.
  // `check` then throws with the third rank as the cause.
  check();
  record(fault, peer);
  throw PeerError(fault, peer);
}

/// Spin and yield for up to kAwakeSecs, without a futex wait. Returns whether `is_met()` is true.
template <typename Condition>
bool Signals::look_for(const Condition& is_met) {
  const auto look = [&] {
    for (int i = 0; i < kLooksPerYield; ++i) {
      if (is_met()) return true;
      relax();
    }
    return false;
  };
  if (look()) return true;
  if (num_short_waits_ > 0) {
    --num_short_waits_;
    return false;
  }
  const auto end = Clock::now() + Secs(kAwakeSecs);
  for (auto before = Clock::now(); before < end;) {
    sched_yield();
    const auto after = Clock::now();
    if (Secs(after - before).count() > kLateYieldSecs) num_short_waits_ = kWaitsAfterLateYield;
    if (look()) return true;
    before = after;
  }
  return false;
}

bool Signals::has_hung_up(size_t peer) const {
  pollfd lifeline{lifelines_[peer], POLLRDHUP, 0};
  // POLLIN is not requested: messages on the socket do not matter here. For a descriptor of -1,
  // poll reports nothing.
  return poll(&lifeline, 1, 0) > 0;
}

/// The last rank in the chain of waits: `peer`, or the rank for which `peer` sleeps, and so on.
int Signals::latest_of(size_t peer) const {
  size_t rank = peer;
  for (size_t hop = 0; hop < headers_.size(); ++hop) {
    const uint32_t next = headers_[rank]->waits_for;
    if (next == 0) return static_cast<int>(rank);
    rank = next - 1;
  }
  return static_cast<int>(peer);  // The chain is a cycle.
}

/// Write a failure to this rank's header and wake all ranks. Does nothing if a failure is there.
void Signals::record(Fault fault, int rank) {
  uint32_t none = 0;
  if (!own().failure.compare_exchange_strong(none, pack(fault, rank))) return;
  // A rank sleeps on the count of the rank for which it waits, so wake the sleepers of all counts.
  for (SignalHeader* header : headers_) wake_all(header->count);
}

void Signals::check_open() const {
  if (is_closed_) throw std::logic_error("this domain is closed.");
}

void Signals::check_rank(int peer) const {
  if (peer < 0 || static_cast<size_t>(peer) >= headers_.size()) {
    throw std::invalid_argument("rank " + std::to_string(peer) + " is not in a domain of " +
                                std::to_string(headers_.size()) + " ranks.");
  }
}

}  // namespace rvdcomm
