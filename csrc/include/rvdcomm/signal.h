// Signals: how the ranks of one machine tell each other "done", and learn that a peer is lost.
//
// Every rank counts its events in a word of shared memory; the others wait for that word. A wait
// ends in one of two ways: the count is reached, or PeerError names the rank at fault.
//
// The safety law: a call returns its own data or raises. Three rules give it, and
// tests/run/shared_memory/model.py explores them exhaustively:
//  1. History. A rank publishes a digest of all its calls up to the present one before the first
//     event of that call. A waiter believes a count only if the digests are equal: then the counts
//     of both ranks began the call alike, and the memory behind the count belongs to this call.
//  2. A failure is for good. A rank writes its failure before it raises, and begins no call once it
//     knows of a failure of any rank.
//  3. Failures are looked for once more after the last read of a call. A rank that failed may have
//     given its memory back to the caller, who may have written there.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <vector>

namespace rvdcomm {

/// Why a wait cannot end well.
enum class Fault : uint32_t {
  kNone = 0,
  kDead = 1,       ///< the rank's process ended, or it closed its island
  kTimeout = 2,    ///< the rank did not come in time
  kFailed = 3,     ///< the rank said itself that it gave up
  kElsewhere = 4,  ///< the rank is in another call than the one that waits for it
};

/// The first bytes of a rank's segment.
///
/// Invariants: only the owner writes, but for `num_sleepers`; `failure` changes once, from none to
/// the first failure that the owner met. Fields that change for different reasons are on lines of
/// their own, so that a rank that spins on `count` disturbs nobody. `history[n % kNumKept]` is the
/// digest of the calls up to number n; it is written before `num_calls` becomes n, and kept until
/// no rank can ask for it. `locations` holds a word of the owner's for each of the same calls:
/// where its source lies in memory that the others map, or 0.
struct SignalHeader {
  static constexpr size_t kLineBytes = 64;
  static constexpr size_t kNumKept = 7;  // What fills the line of `num_calls`.
  /// "rvdcomm" and a version: ranks with different headers must not read each other's.
  static constexpr uint64_t kFormat = 0x7276'6463'6f6d'6d03;

  std::atomic<uint64_t> format{kFormat};
  alignas(kLineBytes) std::atomic<uint32_t> count{0};         ///< events done, modulo 2^32
  alignas(kLineBytes) std::atomic<uint32_t> num_sleepers{0};  ///< ranks asleep on `count`
  alignas(kLineBytes) std::atomic<uint32_t> failure{0};       ///< a packed Fault and rank; 0: none
  std::atomic<uint32_t> waits_for{0};  ///< 1 + the rank on which the owner is asleep; 0: none
  alignas(kLineBytes) std::atomic<uint64_t> num_calls{0};  ///< calls that the owner has begun
  std::atomic<uint64_t> history[kNumKept] = {};
  alignas(kLineBytes) std::atomic<uint64_t> locations[kNumKept] = {};
};

static_assert(std::atomic<uint64_t>::is_always_lock_free, "atomics are shared by processes");
static_assert(std::atomic<uint32_t>::is_always_lock_free, "atomics are shared by processes");
static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "the kernel waits on the word");
static_assert(sizeof(SignalHeader) == 6 * SignalHeader::kLineBytes, "one layout for all builds");

/// A rank of the island is lost. Ranks are indices in the island.
class PeerError : public std::runtime_error {
 public:
  PeerError(Fault fault, int rank);

  Fault fault;
  int rank;
};

/// The view that one rank of an island has of all headers.
///
/// Laws (csrc/tests/test_signal.cpp): what a rank wrote before `advance` is seen by whoever waited
/// for that count; ranks in different calls raise, whatever their counts; a failure that one rank
/// meets is raised by all that wait, with the same rank named; after it every wait and every
/// `begin` raises, for good.
///
/// One thread at a time calls `begin`, `advance`, `wait` and `end`; all else is safe from any
/// thread.
class Signals {
 public:
  /// Called between slices of a long wait; may throw, which counts as `fail`.
  using Hook = std::function<void()>;

  /// @param headers    one a rank; they outlive this object.
  /// @param lifelines  one a rank: a socket whose other end that rank alone holds; -1 for `self`.
  /// @throws std::invalid_argument if sizes or a header's format are wrong.
  Signals(int self, std::vector<SignalHeader*> headers, std::vector<int> lifelines);

  /// Make the memory at `address` a header; the owner does that before any other rank maps it.
  static void format(void* address);

  /// Begin the next call. `identity` says what the call does; it is equal on all ranks that make
  /// it; `location` is this rank's own word for the others. Waits only for ranks that are
  /// kNumKept - 2 calls behind.
  /// @throws PeerError     any rank has failed, or is late.
  void begin(uint64_t identity, uint64_t location, double timeout_secs,
             const Hook& between_slices = {});

  /// The location that `peer` gave in the present call; waits until it has begun that.
  /// @throws PeerError     the peer is dead, late or in another call, or any rank has failed.
  uint64_t location(int peer, double timeout_secs, const Hook& between_slices = {});

  /// The call is over, in which rank i counted `num_events[i]` events. What was read in it may be
  /// believed once this has returned.
  /// @throws PeerError     any rank has failed.
  /// @throws std::invalid_argument  there is not one number a rank.
  void end(const std::vector<uint32_t>& num_events);

  /// Publish: all that this rank wrote before is seen by ranks that wait for the new count.
  void advance();

  /// How often this rank advanced, modulo 2^32.
  uint32_t count() const;

  /// Return once `peer` has counted `num_events` (less than 2^31) in the present call; 0 stands for
  /// all events of the calls before.
  /// @throws PeerError     the peer is dead, late or in another call, or any rank has failed.
  /// @throws std::logic_error  after `close`.
  void wait(int peer, uint32_t num_events, double timeout_secs, const Hook& between_slices = {});

  /// Break the island: all ranks that wait, now or later, raise and name this one.
  void fail();

  /// Raise if this rank or any other has failed.
  void check();

  /// Break the island because of `peer`. If another rank has named the cause before, that is it.
  [[noreturn]] void blame(Fault fault, int peer);

  /// Let go of the lifelines: every later call that waits or publishes throws. Tells nobody.
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
  std::atomic<int> num_short_waits_{0};  ///< waits that will not yield before they sleep
  std::atomic<bool> is_closed_{false};
};

}  // namespace rvdcomm
