// Signals between threads; one test forks a process. Every rank has its own Signals object.
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "rvdcomm/signal.h"

namespace {

using rvdcomm::Fault;
using rvdcomm::PeerError;
using rvdcomm::SignalHeader;
using rvdcomm::Signals;

constexpr double kLongSecs = 30.0;
// A lost rank is noticed within one slice of 50 ms. The rest is a margin for a busy machine.
constexpr double kSoonSecs = 10.0;

void expect(bool is_true, const char* law) {
  if (is_true) return;
  std::fprintf(stderr, "not so: %s\n", law);
  std::exit(1);
}

/// Headers in memory that a forked child shares, and a socket between every two ranks.
class Ranks {
 public:
  explicit Ranks(int num_ranks)
      : num_bytes_(static_cast<size_t>(num_ranks) * sizeof(SignalHeader)) {
    memory_ = mmap(nullptr, num_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    expect(memory_ != MAP_FAILED, "memory is there");
    for (int rank = 0; rank < num_ranks; ++rank) {
      headers_.push_back(static_cast<SignalHeader*>(memory_) + rank);
      Signals::format(headers_.back());
    }
    lifelines_.resize(headers_.size(), std::vector<int>(headers_.size(), -1));
    for (size_t a = 0; a < headers_.size(); ++a) {
      for (size_t b = 0; b < a; ++b) {
        std::array<int, 2> ends{};
        expect(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends.data()) == 0, "sockets are there");
        lifelines_[a][b] = ends[0];
        lifelines_[b][a] = ends[1];
      }
    }
  }
  ~Ranks() {
    for (size_t rank = 0; rank < headers_.size(); ++rank) hang_up(rank);
    munmap(memory_, num_bytes_);
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  SignalHeader& header(int rank) { return *headers_[static_cast<size_t>(rank)]; }
  Signals signals(int rank) { return {rank, headers_, lifelines_[static_cast<size_t>(rank)]}; }

  /// Close the sockets of `rank`, as the kernel does when a process ends.
  void hang_up(size_t rank) {
    for (int& end : lifelines_[rank]) {
      if (end >= 0) close(end);
      end = -1;
    }
  }

 private:
  const size_t num_bytes_;
  void* memory_;
  std::vector<SignalHeader*> headers_;
  std::vector<std::vector<int>> lifelines_;
};

/// The PeerError that a call throws, if any, and the time that the call takes.
struct Outcome {
  Fault fault = Fault::kNone;
  int rank = -1;
  double secs = 0;
};

Outcome outcome_of(const std::function<void()>& call) {
  const auto start = std::chrono::steady_clock::now();
  Outcome outcome;
  try {
    call();
  } catch (const PeerError& error) {
    outcome.fault = error.fault;
    outcome.rank = error.rank;
  }
  outcome.secs = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return outcome;
}

bool is_fault(const Outcome& outcome, Fault fault, int rank) {
  return outcome.fault == fault && outcome.rank == rank && outcome.secs < kSoonSecs;
}

// --- laws ---------------------------------------------------------------------------------------

void what_was_written_before_advance_is_seen_after_wait() {
  constexpr int kNumRanks = 4;
  constexpr uint32_t kNumRounds = 3000;
  Ranks ranks(kNumRanks);
  std::array<std::array<uint32_t, 16>, kNumRanks> data{};
  std::atomic<int> num_torn{0};
  std::vector<std::thread> threads;
  for (int self = 0; self < kNumRanks; ++self) {
    threads.emplace_back([&, self] {
      Signals signals = ranks.signals(self);
      const auto barrier = [&] {
        signals.advance();
        for (int peer = 0; peer < kNumRanks; ++peer) signals.wait(peer, signals.count(), kLongSecs);
      };
      for (uint32_t round = 0; round < kNumRounds; ++round) {
        data[static_cast<size_t>(self)].fill(round);
        barrier();
        for (const auto& each : data) {
          for (const uint32_t value : each) num_torn += value != round;
        }
        barrier();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  expect(num_torn == 0, "what was written before advance is seen after wait");
}

void a_sleeper_is_woken() {
  Ranks ranks(2);
  Signals waiter = ranks.signals(0);
  std::thread late([&] {
    Signals signals = ranks.signals(1);
    while (ranks.header(1).num_sleepers == 0) std::this_thread::yield();
    signals.advance();
  });
  waiter.wait(1, 1, kLongSecs);
  late.join();
  expect(ranks.header(1).num_sleepers == 0, "a rank that was woken is no sleeper");
  expect(ranks.header(0).waits_for == 0, "a rank that was woken waits for nobody");
}

void counts_wrap_around() {
  Ranks ranks(2);
  ranks.header(1).count = 0xffff'fffe;
  Signals signals = ranks.signals(1);
  for (int i = 0; i < 4; ++i) signals.advance();
  Signals waiter = ranks.signals(0);
  waiter.wait(1, 0xffff'ffff, kLongSecs);
  waiter.wait(1, 2, kLongSecs);
  const Outcome beyond = outcome_of([&] { waiter.wait(1, 3, 0.01); });
  expect(is_fault(beyond, Fault::kTimeout, 1), "a count beyond 2^32 is waited for");
}

void a_rank_that_hangs_up_is_dead() {
  Ranks ranks(3);
  Signals first = ranks.signals(0);
  Signals second = ranks.signals(2);
  ranks.signals(1).advance();
  ranks.hang_up(1);
  first.wait(1, 1, kLongSecs);  // Rank 1 counted this event before it hung up.
  const Outcome met = outcome_of([&] { first.wait(1, 2, kLongSecs); });
  expect(is_fault(met, Fault::kDead, 1), "a rank that hangs up is dead");
  const Outcome told = outcome_of([&] { second.wait(0, 1, kLongSecs); });
  expect(is_fault(told, Fault::kDead, 1), "who waits for a rank that met the death is told");
  const Outcome again = outcome_of([&] { second.wait(0, 0, kLongSecs); });
  expect(is_fault(again, Fault::kDead, 1), "a broken domain stays broken");
}

void a_killed_process_is_dead() {
  // Each process closes the end of the other process, so that it holds only its own end.
  Ranks ranks(2);
  std::array<int, 2> ends{};
  expect(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends.data()) == 0, "sockets are there");
  const pid_t child = fork();
  expect(child >= 0, "a process is there");
  const std::vector<SignalHeader*> headers{&ranks.header(0), &ranks.header(1)};
  if (child == 0) {
    close(ends[0]);
    Signals signals(1, headers, {ends[1], -1});
    signals.advance();
    while (true) pause();
  }
  close(ends[1]);
  Signals signals(0, headers, {-1, ends[0]});
  signals.wait(1, 1, kLongSecs);
  std::thread killer([&] {
    while (ranks.header(1).num_sleepers == 0) std::this_thread::yield();
    kill(child, SIGKILL);
  });
  const Outcome met = outcome_of([&] { signals.wait(1, 2, kLongSecs); });
  killer.join();
  waitpid(child, nullptr, 0);
  close(ends[0]);
  expect(is_fault(met, Fault::kDead, 1), "a process that is killed is dead");
}

void the_rank_that_all_wait_for_is_late() {
  Ranks ranks(3);
  std::array<Outcome, 2> met;
  std::vector<std::thread> threads;
  for (int self = 0; self < 2; ++self) {
    threads.emplace_back([&, self] {
      Signals signals = ranks.signals(self);
      while (self == 0 && ranks.header(1).waits_for == 0) std::this_thread::yield();
      met[static_cast<size_t>(self)] = outcome_of([&] { signals.wait(self + 1, 1, 0.3); });
    });
  }
  for (std::thread& thread : threads) thread.join();
  expect(is_fault(met[0], Fault::kTimeout, 2),
         "a rank that waits for a waiting one names the last");
  expect(is_fault(met[1], Fault::kTimeout, 2), "a rank that waits for a late one names it");
}

void a_rank_that_fails_is_named_by_all() {
  Ranks ranks(3);
  Outcome met;
  std::thread waiter([&] {
    Signals signals = ranks.signals(0);
    met = outcome_of([&] { signals.wait(1, 1, kLongSecs); });
  });
  Signals failing = ranks.signals(2);
  failing.fail();
  waiter.join();
  expect(is_fault(met, Fault::kFailed, 2), "a rank that fails is named by those that wait");
  const Outcome own = outcome_of([&] { failing.check(); });
  expect(is_fault(own, Fault::kFailed, 2), "a rank that fails cannot go on");
}

void a_hook_that_throws_ends_the_wait() {
  Ranks ranks(2);
  Signals signals = ranks.signals(0);
  bool is_thrown = false;
  try {
    signals.wait(1, 1, kLongSecs, [] { throw std::domain_error("stop"); });
  } catch (const std::domain_error&) {
    is_thrown = true;
  }
  expect(is_thrown, "what a hook throws reaches the caller");
  Signals other = ranks.signals(1);
  const Outcome told = outcome_of([&] { other.wait(0, 1, kLongSecs); });
  expect(is_fault(told, Fault::kFailed, 0), "a rank whose hook throws has failed");
}

void ranks_in_one_call_believe_each_other() {
  Ranks ranks(2);
  Signals first = ranks.signals(0);
  Signals second = ranks.signals(1);
  // The second rank finishes every call before the first rank begins it.
  for (uint64_t call = 1; call <= 100; ++call) {
    second.begin(call, 0, kLongSecs);
    second.advance();
    second.advance();
    second.end({0, 2});
    first.begin(call, 0, kLongSecs);
    first.wait(1, 0, kLongSecs);
    first.wait(1, 2, kLongSecs);
    first.end({0, 2});
  }
}

void ranks_in_different_calls_are_told_at_once() {
  Ranks ranks(2);
  Signals first = ranks.signals(0);
  Signals second = ranks.signals(1);
  second.begin(7, 0, kLongSecs);
  first.begin(8, 0, kLongSecs);
  const Outcome waiting = outcome_of([&] { first.wait(1, 1, kLongSecs); });
  expect(is_fault(waiting, Fault::kElsewhere, 1), "a rank that waits in another call is told");
  const Outcome told = outcome_of([&] { second.begin(8, 0, kLongSecs); });
  expect(is_fault(told, Fault::kElsewhere, 1), "no rank begins a call after a failure");
}

void a_count_of_another_history_is_not_believed() {
  Ranks ranks(2);
  Signals first = ranks.signals(0);
  Signals second = ranks.signals(1);
  second.begin(1, 0, kLongSecs);
  for (int i = 0; i < 5; ++i) second.advance();
  second.end({0, 5});
  second.begin(3, 0, kLongSecs);
  second.advance();
  first.begin(2, 0, kLongSecs);
  first.end({0, 1});
  first.begin(3, 0, kLongSecs);  // The present calls are equal, the calls before them are not.
  const Outcome now = outcome_of([&] { first.wait(1, 1, kLongSecs); });
  expect(is_fault(now, Fault::kElsewhere, 1), "a count of another history is not believed");
}

void a_failure_is_seen_at_the_end_of_a_call() {
  Ranks ranks(2);
  Signals first = ranks.signals(0);
  Signals second = ranks.signals(1);
  second.begin(1, 0, kLongSecs);
  second.advance();
  first.begin(1, 0, kLongSecs);
  first.wait(1, 1, kLongSecs);
  second.fail();
  const Outcome end = outcome_of([&] { first.end({0, 1}); });
  expect(is_fault(end, Fault::kFailed, 1), "what was read of a rank that failed is not returned");
}

void no_rank_runs_ahead_of_what_others_ask_for() {
  Ranks ranks(2);
  Signals second = ranks.signals(1);
  Signals first = ranks.signals(0);
  first.begin(1, 0, kLongSecs);
  for (uint64_t call = 1; call <= SignalHeader::kNumKept - 1; ++call) {
    second.begin(call, 0, kLongSecs);
    second.advance();
    second.end({0, 1});
  }
  first.wait(1, 0, kLongSecs);  // The history of no calls is still there.
  const Outcome ahead = outcome_of([&] { second.begin(SignalHeader::kNumKept, 0, 0.01); });
  expect(is_fault(ahead, Fault::kTimeout, 0), "a rank waits for one that is far behind");
}

void a_location_is_that_of_the_present_call() {
  Ranks ranks(2);
  Signals first = ranks.signals(0);
  Signals second = ranks.signals(1);
  for (uint64_t call = 1; call <= 100; ++call) {
    second.begin(call, 1000 + call, kLongSecs);
    second.end({0, 0});
    // The second rank is one call ahead of the first.
    if (call > 1) {
      first.begin(call - 1, 0, kLongSecs);
      expect(first.location(1, kLongSecs) == 999 + call, "a location is the present call's");
      expect(first.location(0, kLongSecs) == 0, "a rank knows its own");
      first.end({0, 0});
    }
  }
  first.begin(100, 0, kLongSecs);
  first.end({0, 0});
  first.begin(7, 0, kLongSecs);
  const Outcome late = outcome_of([&] { first.location(1, 0.01); });
  expect(is_fault(late, Fault::kTimeout, 1), "a rank that has not begun the call is late");
}

void the_location_of_another_call_is_not_believed() {
  Ranks ranks(2);
  Signals first = ranks.signals(0);
  Signals second = ranks.signals(1);
  second.begin(1, 5, kLongSecs);
  first.begin(2, 0, kLongSecs);
  const Outcome told = outcome_of([&] { first.location(1, kLongSecs); });
  expect(is_fault(told, Fault::kElsewhere, 1), "the location of another call is not believed");
}

void closed_signals_throw() {
  Ranks ranks(2);
  Signals signals = ranks.signals(0);
  signals.close();
  bool is_thrown = false;
  try {
    signals.advance();
  } catch (const std::logic_error&) {
    is_thrown = true;
  }
  expect(is_thrown, "closed signals throw");
  expect(ranks.header(0).count == 0, "closed signals change nothing");
}

void another_format_is_refused() {
  Ranks ranks(2);
  ranks.header(1).format = SignalHeader::kFormat + 1;
  bool is_thrown = false;
  try {
    ranks.signals(0);
  } catch (const std::invalid_argument& error) {
    is_thrown = std::string(error.what()).find("rank 1") != std::string::npos;
  }
  expect(is_thrown, "a header of another version is refused, with the rank named");
}

}  // namespace

int main() {
  what_was_written_before_advance_is_seen_after_wait();
  a_sleeper_is_woken();
  counts_wrap_around();
  a_rank_that_hangs_up_is_dead();
  a_killed_process_is_dead();
  the_rank_that_all_wait_for_is_late();
  a_rank_that_fails_is_named_by_all();
  a_hook_that_throws_ends_the_wait();
  ranks_in_one_call_believe_each_other();
  ranks_in_different_calls_are_told_at_once();
  a_count_of_another_history_is_not_believed();
  a_failure_is_seen_at_the_end_of_a_call();
  no_rank_runs_ahead_of_what_others_ask_for();
  a_location_is_that_of_the_present_call();
  the_location_of_another_call_is_not_believed();
  closed_signals_throw();
  another_format_is_refused();
}
