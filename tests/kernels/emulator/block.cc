// Threads of a block, and where they wait for each other.
#include "tests/kernels/emulator/block.h"

#include <cuda_runtime.h>

#include <cstdio>
#include <map>
#include <string>

uint3 threadIdx = {};
uint3 blockIdx = {};
dim3 blockDim;
dim3 gridDim;

namespace astrai::emulator {
namespace {

void thread_main(void* argument) {
  (*running->kernel)();
  Thread& thread = *static_cast<Thread*>(argument);
  thread.owner->exit_thread(thread);
}

void set_running(Thread* thread) {
  this_thread = thread;
  threadIdx = thread->index;
}

}  // namespace

Thread* this_thread = nullptr;

void Block::assign(uint3 index, Cluster* cluster, uint32_t rank) {
  index_ = index;
  cluster_ = cluster;
  rank_ = rank;
  fresh_ = true;
}

void Block::start() {
  fresh_ = false;
  const dim3 dim = running->config.blockDim;
  thread_count_ = size_t{dim.x} * dim.y * dim.z;
  while (threads_.size() < thread_count_) threads_.push_back(std::make_unique<Thread>());
  shared_.prepare(running->entry, running->config.dynamicSmemBytes);
  warps_.assign((thread_count_ + 31) / 32, Warp());
  barrier_.waiting.clear();
  runnable_.clear();
  live_ = thread_count_;
  for (size_t i = 0; i < thread_count_; ++i) {
    Thread& thread = *threads_[i];
    const unsigned n = static_cast<unsigned>(i);
    thread.index = {n % dim.x, n / dim.x % dim.y, n / dim.x / dim.y};
    thread.lane = static_cast<int>(i % 32);
    thread.owner = this;
    thread.warp = i / 32;
    thread.exited = false;
    thread.waits_for = nullptr;
    thread.cluster_arrived = false;
    thread.cluster_phase = 0;
    thread.waited_for_previous = false;
    thread.copies.clear();
    thread.groups = 0;
    thread.fiber.reset(thread_main, &thread);
    warps_[i / 32].live |= 1u << (i % 32);
    runnable_.push_back(&thread);
  }
}

void Block::run() {
  if (fresh_) start();
  if (Thread* next = pick()) {
    blockIdx = index_;
    blockDim = running->config.blockDim;
    gridDim = running->config.gridDim;
    dynamic_smem = shared_.dynamic();
    set_running(next);
    Fiber::switch_to(home_, next->fiber);
    this_thread = nullptr;
  }
}

Thread* Block::pick() {
  if (runnable_.empty()) return nullptr;
  Thread*& chosen = runnable_[running->random.below(static_cast<uint32_t>(runnable_.size()))];
  Thread* thread = chosen;
  chosen = runnable_.back();
  runnable_.pop_back();
  return thread;
}

void Block::switch_away(Thread& from) {
  Thread* next = running->wants_handoff() ? nullptr : pick();
  if (next == &from) return;
  if (next != nullptr) {
    set_running(next);
    Fiber::switch_to(from.fiber, next->fiber);
  } else {
    Fiber::switch_to(from.fiber, home_);
  }
}

void Block::wake(Thread& thread) {
  running->idle = 0;
  thread.waits_for = nullptr;
  runnable_.push_back(&thread);
}

void Block::wait(const char* what, Place place) {
  Thread& thread = current();
  thread.waits_for = what;
  thread.place = place;
  switch_away(thread);
}

void Block::yield() {
  Thread& thread = current();
  runnable_.push_back(&thread);
  if (running->workers.size() > 1 && running->random.below(2) == 0) {
    Fiber::switch_to(thread.fiber, home_);
  } else {
    switch_away(thread);
  }
}

// ---- Block barriers -----------------------------------------------------------------------------

int Block::barrier(BarrierKind kind, bool predicate, Place place) {
  static constexpr const char* kNames[] = {"__syncthreads", "__syncthreads_count",
                                           "__syncthreads_and", "__syncthreads_or"};
  const char* name = kNames[static_cast<int>(kind)];
  if (barrier_.waiting.empty()) {
    barrier_.kind = kind;
    barrier_.true_count = 0;
  } else if (barrier_.kind != kind) {
    fail("%s (%s:%d): other threads of the block wait at %s (%s:%d)", name, place.file, place.line,
         barrier_.waiting[0]->waits_for, barrier_.waiting[0]->place.file,
         barrier_.waiting[0]->place.line);
  }
  barrier_.true_count += predicate;
  barrier_.waiting.push_back(&current());
  current().waits_for = name;
  current().place = place;
  release_barrier_if_complete();
  switch_away(current());
  return barrier_.result;
}

void Block::release_barrier_if_complete() {
  const size_t arrived = barrier_.waiting.size();
  if (arrived == 0 || arrived < live_) return;
  switch (barrier_.kind) {
    case BarrierKind::kSync:
      break;
    case BarrierKind::kCount:
      barrier_.result = barrier_.true_count;
      break;
    case BarrierKind::kAnd:
      barrier_.result = static_cast<size_t>(barrier_.true_count) == arrived;
      break;
    case BarrierKind::kOr:
      barrier_.result = barrier_.true_count > 0;
      break;
  }
  for (Thread* thread : barrier_.waiting) wake(*thread);
  barrier_.waiting.clear();
}

// ---- Warps --------------------------------------------------------------------------------------

void Block::warp_rendezvous(const WarpOp& op, uint32_t mask, void* data, Place place) {
  Thread& thread = current();
  std::vector<WarpWait>& waits = warps_[thread.warp].waits;
  if ((mask >> thread.lane & 1u) == 0) {
    fail("%s (%s:%d): the mask %08x lacks the calling lane", op.name, place.file, place.line, mask);
  }
  size_t which = 0;
  while (which < waits.size() && waits[which].mask != mask) ++which;
  if (which == waits.size()) waits.push_back({&op, mask, 0, {}});
  WarpWait& wait = waits[which];
  if (wait.op->name != op.name) {
    fail("%s (%s:%d): other lanes of the warp wait at %s", op.name, place.file, place.line,
         wait.op->name);
  }
  wait.arrived |= 1u << thread.lane;
  wait.data[thread.lane] = data;
  thread.waits_for = op.name;
  thread.place = place;
  release_if_complete(thread.warp, which);
  switch_away(thread);
}

bool Block::release_if_complete(size_t warp, size_t which) {
  Warp& w = warps_[warp];
  WarpWait& wait = w.waits[which];
  if ((wait.mask & w.live & ~wait.arrived) != 0) return false;
  wait.op->run(wait.data, wait.arrived);
  for (size_t lane = 0; lane < 32; ++lane) {
    if (wait.arrived >> lane & 1u) wake(*threads_[warp * 32 + lane]);
  }
  wait = w.waits.back();
  w.waits.pop_back();
  return true;
}

// ---- The end ------------------------------------------------------------------------------------

void Block::exit_thread(Thread& thread) {
  require_wait("exit");
  finish_copies(thread);
  running->idle = 0;
  thread.exited = true;
  --live_;
  Warp& warp = warps_[thread.warp];
  warp.live &= ~(1u << thread.lane);
  for (size_t which = 0; which < warp.waits.size();) {
    if (!release_if_complete(thread.warp, which)) ++which;
  }
  release_barrier_if_complete();
  cluster_->exit_thread(thread);
  if (live_ == 0) shared_.check_end();
  switch_away(thread);
}

void Block::print_waiting() const {
  struct Group {
    size_t count = 0;
    const Thread* first = nullptr;
  };
  std::map<std::string, Group> groups;
  for (size_t i = 0; i < thread_count_ && !fresh_; ++i) {
    const Thread& thread = *threads_[i];
    if (thread.exited) continue;
    const std::string where = thread.waits_for == nullptr
                                  ? "not waiting"
                                  : std::string("at ") + thread.waits_for + " (" +
                                        thread.place.file + ":" +
                                        std::to_string(thread.place.line) + ")";
    Group& group = groups[where];
    if (group.count++ == 0) group.first = &thread;
  }
  for (const auto& [where, group] : groups) {
    const char* verb = group.first->waits_for == nullptr ? (group.count == 1 ? " is" : "s are")
                                                         : (group.count == 1 ? " waits" : "s wait");
    std::fprintf(stderr, "  block (%u, %u, %u): %zu thread%s %s, the first is (%u, %u, %u)\n",
                 index_.x, index_.y, index_.z, group.count, verb, where.c_str(),
                 group.first->index.x, group.first->index.y, group.first->index.z);
  }
}

// ---- device.h -----------------------------------------------------------------------------------

int block_barrier(BarrierKind kind, bool predicate, Place place) {
  return current().owner->barrier(kind, predicate, place);
}

void warp_rendezvous(const WarpOp& op, uint32_t mask, void* data, Place place) {
  current().owner->warp_rendezvous(op, mask, data, place);
}

int lane_index() { return current().lane; }

uint32_t live_lanes() { return current().owner->live_lanes(current().warp); }

void yield() { current().owner->yield(); }

bool one_in(uint32_t n) { return running->random.below(n) == 0; }

}  // namespace astrai::emulator
