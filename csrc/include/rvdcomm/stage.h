// Stages: the copies, waits and events of one rank between two calls of a backend, run by one call.
#pragma once

#include <cstdint>
#include <vector>

#include "rvdcomm/copy_program.h"
#include "rvdcomm/signal.h"

namespace rvdcomm {

/// One action: run a copy program, wait for a peer, or count an event.
struct Action {
  enum class Kind : int32_t { kCopy, kAwait, kAdvance };

  Kind kind;
  int32_t index;   ///< index of the copy program (kCopy) or of the peer (kAwait)
  uint32_t count;  ///< kAwait: events of the peer in this call to wait for (Signals::wait)
};

/// Actions that run in order. The first buffers of their copy programs are the caller's shards; the
/// buffers after them are set by the last `bind`.
class Stage {
 public:
  /// @throws std::invalid_argument if an action names a program that does not exist
  Stage(std::vector<CopyProgram> programs, std::vector<Action> actions, int num_shards);

  /// Set the buffers that follow the shards, and the signals of the domain, for all later runs.
  /// @pre signals outlive the runs; null only if no action waits or counts
  void bind(std::vector<void*> memory, Signals* signals, double timeout_secs);

  /// Set the address of a shard for the next run.
  /// @pre 0 <= index < num_shards()
  void set_shard(int index, void* address) { buffers_[static_cast<size_t>(index)] = address; }
  int num_shards() const { return num_shards_; }

  /// @throws PeerError  a peer is dead, late or has failed
  void run(int num_threads, const Signals::Hook& between_slices);

  /// Run the stage as one whole call of the domain: `Signals::begin` with location 0, `run`, and
  /// `Signals::end`. Without signals, the same as `run`.
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
