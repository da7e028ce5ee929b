// Stages: what one rank does between two calls of a backend, in one go.
#pragma once

#include <cstdint>
#include <vector>

#include "rvdcomm/copy_program.h"
#include "rvdcomm/signal.h"

namespace rvdcomm {

/// The counts that the ranks of an island had when the current call began, by index in the island.
///
/// All programs of one island share them: its ranks run the same programs in the same order, so
/// that every rank knows how far the others have counted when a call is over.
class Counts {
 public:
  explicit Counts(int num_ranks) : at_start_(static_cast<size_t>(num_ranks), 0) {}

  /// The count that `peer` has after `count` events of the current call.
  uint32_t after(int32_t peer, uint32_t count) const {
    return at_start_.at(static_cast<size_t>(peer)) + count;
  }

  /// The current call is over: rank i has counted `totals[i]` events in it.
  /// @throws std::invalid_argument if there is not one total a rank
  void add(const std::vector<uint32_t>& totals);

 private:
  std::vector<uint32_t> at_start_;
};

/// One thing to do: run a copy program, wait for a peer, or count an event.
struct Action {
  enum class Kind : int32_t { kCopy, kAwait, kAdvance };

  Kind kind;
  int32_t index;   ///< of the copy program, or of the peer
  uint32_t count;  ///< events of the peer to wait for, since the call began
};

/// Actions in order. The first buffers are the caller's shards, the others those of the last
/// `bind`.
class Stage {
 public:
  /// @throws std::invalid_argument if an action names a program that there is not
  Stage(std::vector<CopyProgram> programs, std::vector<Action> actions, int num_shards);

  /// The memory besides the shards, and the island, for all runs to come.
  /// @pre signals and counts outlive the runs; null only if no action waits or counts
  void bind(std::vector<void*> memory, Signals* signals, const Counts* counts, double timeout_secs);

  /// The address of a shard, for the next run.
  /// @pre 0 <= index < num_shards()
  void set_shard(int index, void* address) { buffers_[static_cast<size_t>(index)] = address; }
  int num_shards() const { return num_shards_; }

  /// @throws PeerError  a peer is dead, late or has failed
  void run(int num_threads, const Signals::Hook& between_slices);

 private:
  const std::vector<CopyProgram> programs_;
  const std::vector<Action> actions_;
  const int num_shards_;
  std::vector<void*> buffers_;
  Signals* signals_ = nullptr;
  const Counts* counts_ = nullptr;
  double timeout_secs_ = 0;
};

}  // namespace rvdcomm
