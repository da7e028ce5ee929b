// Stages: what one rank does between two calls of a backend, in one go.
#pragma once

#include <cstdint>
#include <vector>

#include "rvdcomm/copy_program.h"
#include "rvdcomm/signal.h"

namespace rvdcomm {

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
  /// @pre signals outlive the runs; null only if no action waits or counts
  void bind(std::vector<void*> memory, Signals* signals, double timeout_secs);

  /// The address of a shard, for the next run.
  /// @pre 0 <= index < num_shards()
  void set_shard(int index, void* address) { buffers_[static_cast<size_t>(index)] = address; }
  int num_shards() const { return num_shards_; }

  /// @throws PeerError  a peer is dead, late or has failed
  void run(int num_threads, const Signals::Hook& between_slices);

  /// The same as one whole call of the island, if there is one: `Signals::begin` before it, with no
  /// location, and `Signals::end` after it.
  /// @throws PeerError  a peer is dead, late or has failed
  void call(int num_threads, uint64_t identity, const std::vector<uint32_t>& num_events,
            const Signals::Hook& between_slices);

 private:
  const std::vector<CopyProgram> programs_;
  const std::vector<Action> actions_;
  const int num_shards_;
  std::vector<void*> buffers_;
  Signals* signals_ = nullptr;
  double timeout_secs_ = 0;
};

}  // namespace rvdcomm
