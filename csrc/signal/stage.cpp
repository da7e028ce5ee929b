#include "rvdcomm/stage.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace rvdcomm {

Stage::Stage(std::vector<CopyProgram> programs, std::vector<Action> actions, int num_shards)
    : programs_(std::move(programs)),
      actions_(std::move(actions)),
      num_shards_(num_shards),
      buffers_(static_cast<size_t>(num_shards), nullptr) {
  for (const Action& action : actions_) {
    const bool is_known = action.index >= 0 && static_cast<size_t>(action.index) < programs_.size();
    if (action.kind == Action::Kind::kCopy && !is_known) {
      throw std::invalid_argument("copy program " + std::to_string(action.index) + " of " +
                                  std::to_string(programs_.size()) + " does not exist.");
    }
  }
}

void Stage::bind(std::vector<void*> memory, Signals* signals, double timeout_secs) {
  buffers_.resize(static_cast<size_t>(num_shards_));
  buffers_.insert(buffers_.end(), memory.begin(), memory.end());
  signals_ = signals;
  timeout_secs_ = timeout_secs;
}

void Stage::run(int num_threads, const Signals::Hook& between_slices) {
  for (const Action& action : actions_) {
    switch (action.kind) {
      case Action::Kind::kCopy:
        programs_[static_cast<size_t>(action.index)].run(buffers_.data(), num_threads);
        break;
      case Action::Kind::kAwait:
        signals_->wait(action.index, action.count, timeout_secs_, between_slices);
        break;
      case Action::Kind::kAdvance: signals_->advance(); break;
    }
  }
}

void Stage::call(int num_threads, uint64_t identity, const std::vector<uint32_t>& num_events,
                 const Signals::Hook& between_slices) {
  if (signals_ != nullptr) signals_->begin(identity, 0, timeout_secs_, between_slices);
  run(num_threads, between_slices);
  if (signals_ != nullptr) signals_->end(num_events);
}

}  // namespace rvdcomm
