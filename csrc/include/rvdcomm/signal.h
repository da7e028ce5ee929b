// Signals: event counters through which the ranks of a domain wait for each other, and records of
// failures. An domain is a shared-memory domain: ranks of one machine that map each other's memory.
//
// Every rank counts its events in a word of shared memory, on which the other ranks wait. A wait
// returns when the count is reached, or throws a PeerError that names the rank at fault.
//
// Safety: a call either returns data of this call only, or throws. Three rules ensure this.
// tests/run/shared_memory/model.py explores them exhaustively:
//  1. History. Before the first event of a call, a rank publishes a digest of all its calls up to
//     this one. A waiter accepts a count only if the digest of the peer equals its own. Then both
//     ranks made the same calls. So the waiter knows the count with which the peer began this call,
//     and the data that the reached count announces belong to this call.
//  2. Failures are permanent. A rank writes its failure to its header before it throws. A rank that
//     sees a failure of any rank begins no further call.
//  3. A rank checks for failures once more after the last read of a call. A rank that failed may
//     have returned its memory to its caller, who may have overwritten the data.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <vector>

namespace rvdcomm {

/// Why a wait cannot succeed.
enum class Fault : uint32_t {
  kNone = 0,
  kDead = 1,       ///< the rank's process ended, or the rank closed its domain
  kTimeout = 2,    ///< the rank did not count an event or begin a call in time
  kFailed = 3,     ///< the rank recorded its own failure (Signals::fail)
  kElsewhere = 4,  ///< the rank made other calls than the rank that waits for it
};

/// The header of a rank: the first bytes of its shared-memory segment.
///
/// Invariants:
///  - Only the owner writes the fields, except `num_sleepers`, which the waiting ranks change.
///  - `failure` changes once, from 0 to the first failure that the owner detected or read.
///  - Fields that change at different times are on different cache lines, so that a rank that spins
///    on `count` does not slow down accesses to the other fields.
///  - `history[n % kNumKept]` is the digest of the calls 1 to n of the owner. It is written before
///    `num_calls` becomes n. `begin` keeps a slot as long as another rank may read it.
///  - `locations[n % kNumKept]` is the argument `location` of call n: where the owner's source is
///    in memory that the other ranks map, or 0.
struct SignalHeader {
  static constexpr size_t kLineBytes = 64;
  static constexpr size_t kNumKept = 7;  // `history` fills the cache line of `num_calls`.
  /// "rvdcomm" in ASCII, and a version. Ranks with different versions refuse to share memory.
  static constexpr uint64_t kFormat = 0x7276'6463'6f6d'6d03;

  std::atomic<uint64_t> format{kFormat};
  alignas(kLineBytes) std::atomic<uint32_t> count{0};         ///< events done, modulo 2^32
  alignas(kLineBytes) std::atomic<uint32_t> num_sleepers{0};  ///< ranks in a futex wait on `count`
  alignas(kLineBytes) std::atomic<uint32_t> failure{0};       ///< a packed Fault and rank; 0: none
  std::atomic<uint32_t> waits_for{0};  ///< 1 + the rank for which the owner sleeps; 0: none
  alignas(kLineBytes) std::atomic<uint64_t> num_calls{0};  ///< calls that the owner has begun
  std::atomic<uint64_t> history[kNumKept] = {};
  alignas(kLineBytes) std::atomic<uint64_t> locations[kNumKept] = {};
};

static_assert(std::atomic<uint64_t>::is_always_lock_free, "atomics are shared by processes");
static_assert(std::atomic<uint32_t>::is_always_lock_free, "atomics are shared by processes");
static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "the kernel waits on the word");
static_assert(sizeof(SignalHeader) == 6 * SignalHeader::kLineBytes, "one layout for all builds");

/// `rank` is lost, so no call of the domain can succeed. Ranks are indices in the domain.
class PeerError : public std::runtime_error {
 public:
  PeerError(Fault fault, int rank);

  Fault fault;
  int rank;
};

/// The headers of a domain, as one of its ranks uses them.
///
/// Laws (csrc/tests/test_signal.cpp):
///  - A rank that has waited for a count sees all that the peer wrote before the `advance` to that
///    count.
///  - Ranks in different calls throw, whatever their counts are.
///  - If one rank detects a failure, all ranks that wait throw and name the same rank.
///  - After a rank has thrown a PeerError, all its later calls of `wait` and `begin` throw one.
///
/// Only one thread at a time may call `begin`, `location`, `advance`, `wait` and `end`. All other
/// methods may be called from any thread.
class Signals {
 public:
  /// Called between the slices of a long wait. If it throws, the wait calls `fail` and rethrows.
  using Hook = std::function<void()>;

  /// @param headers    one per rank; they outlive this object.
  /// @param lifelines  one socket per rank, -1 for `self`. Only the process of that rank holds the
  ///                   other end, so the kernel closes it when the process ends.
  /// @throws std::invalid_argument if sizes or a header's format are wrong.
  Signals(int self, std::vector<SignalHeader*> headers, std::vector<int> lifelines);

  /// Construct a header at `address`. The owner does this before any other rank maps the memory.
  static void format(void* address);

  /// Begin the next call. `identity` describes the call and is equal on all ranks that make it.
  /// `location` is a word that the other ranks can read in this call, and may differ between ranks.
  /// Waits only for ranks that have begun at least kNumKept - 2 calls fewer than this rank: they
  /// may still read the slots of `history` and `locations` that this call overwrites.
  /// @throws PeerError     any rank has failed, or is late.
  void begin(uint64_t identity, uint64_t location, double timeout_secs,
             const Hook& between_slices = {});

  /// The `location` of `peer` in the present call. Waits until the peer has begun the call.
  /// @throws PeerError     the peer is dead, late or in another call, or any rank has failed.
  uint64_t location(int peer, double timeout_secs, const Hook& between_slices = {});

  /// End the present call, in which rank i counts `num_events[i]` events. Data that were read in
  /// the call are valid once this has returned.
  /// @throws PeerError     any rank has failed.
  /// @throws std::invalid_argument  num_events has not one number per rank.
  void end(const std::vector<uint32_t>& num_events);

  /// Count one event and wake sleepers. A rank that waits for the new count sees all that this rank
  /// wrote before.
  void advance();

  /// Events that this rank has counted since its header was made, modulo 2^32. `begin` counts one.
  uint32_t count() const;

  /// Return once `peer` has counted `num_events` (less than 2^31) in the present call; 0 stands for
  /// all events of the calls before.
  /// @throws PeerError     the peer is dead, late or in another call, or any rank has failed.
  /// @throws std::logic_error  after `close`.
  void wait(int peer, uint32_t num_events, double timeout_secs, const Hook& between_slices = {});

  /// Break the domain: all ranks that wait, now or later, throw and name this rank.
  void fail();

  /// Throw a PeerError if this rank or any other has recorded a failure.
  void check();

  /// Break the domain because of `peer`, and throw. If any rank has recorded a failure before,
  /// throw that failure instead.
  [[noreturn]] void blame(Fault fault, int peer);

  /// Stop using the lifelines: every later call that waits or publishes throws. Tells no other
  /// rank.
  void close() { is_closed_ = true; }

 private:
  SignalHeader& own() const { return *headers_[self_]; }
  template <typename Condition>
  void wait_until(size_t peer, double timeout_secs, const Hook& hook, const Condition& is_met);
  template <typename Condition>
  bool look_for(const Condition& is_met);
  bool shares_history(size_t peer, uint64_t number) const;
  bool has_hung_up(size_t peer) const;
  int latest_of(size_t peer) const;
  void record(Fault fault, int rank);
  void check_open() const;
  void check_rank(int peer) const;

  const size_t self_;
  const std::vector<SignalHeader*> headers_;
  const std::vector<int> lifelines_;
  std::vector<uint32_t> at_start_;       ///< counts of all ranks when the present call began
  std::atomic<int> num_short_waits_{0};  ///< next waits that sleep without a yield
  std::atomic<bool> is_closed_{false};
};

}  // namespace rvdcomm
