// Launches: which blocks are there at a time, and whose turn it is.
//
// Each block has an OS thread, so that its static shared memory can be thread-local variables, but
// only the one whose turn it is runs.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <random>
#include <thread>

#include "tests/kernels/emulator/block.h"
#include "tests/kernels/emulator/memory.h"

namespace astrai::emulator {
namespace {

sem_t grid_done;

// Lets another block run, or the host if there is none left. From the worker whose turn it is.
void pass_turn(Worker& self) {
  std::vector<Worker*> ready;
  for (Worker* worker : running->workers) {
    if (worker->block.is_ready()) ready.push_back(worker);
  }
  if (!ready.empty()) {
    Worker* next = ready[running->random.below(static_cast<uint32_t>(ready.size()))];
    if (next == &self) return;
    sem_post(&next->turn);
  } else {
    for (const Worker* worker : running->workers) {
      if (!worker->block.has_exited()) fail("deadlock: no thread can run");
    }
    sem_post(&grid_done);
  }
  while (sem_wait(&self.turn) != 0) {
  }
}

void worker_main(Worker* self) {
  install_fault_handler();
  while (sem_wait(&self->turn) != 0) {
  }
  for (;;) {
    self->block.run();
    Cluster& cluster = self->block.cluster();
    if (cluster.live == 0) running->assign_next(cluster);
    pass_turn(*self);
  }
}

// Workers wait for the next launch and live as long as the process.
Worker* worker(size_t i) {
  static std::vector<Worker*>& workers = *new std::vector<Worker*>;
  while (workers.size() <= i) {
    Worker* added = new Worker;
    sem_init(&added->turn, 0, 0);
    std::thread(worker_main, added).detach();
    workers.push_back(added);
  }
  return workers[i];
}

uint3 unflatten(uint32_t i, dim3 dim) { return {i % dim.x, i / dim.x % dim.y, i / dim.x / dim.y}; }

void run_grid(Grid& grid) {
  const dim3 g = grid.config.gridDim;
  const size_t cluster_count = size_t{g.x} * g.y * g.z / grid.cluster_size();
  grid.order.resize(cluster_count);
  for (size_t i = 0; i < cluster_count; ++i) grid.order[i] = static_cast<uint32_t>(i);
  for (size_t i = cluster_count; i > 1; --i) {
    std::swap(grid.order[i - 1], grid.order[grid.random.below(static_cast<uint32_t>(i))]);
  }
  const size_t concurrent = static_cast<size_t>(std::max(1, env_int("ASTRAI_EMU_CONCURRENT", 2)));
  const size_t groups = std::min(concurrent, cluster_count);
  for (size_t group = 0; group < groups; ++group) {
    auto cluster = std::make_unique<Cluster>();
    for (uint32_t rank = 0; rank < grid.cluster_size(); ++rank) {
      grid.workers.push_back(worker(group * grid.cluster_size() + rank));
      cluster->blocks.push_back(&grid.workers.back()->block);
    }
    grid.assign_next(*cluster);
    grid.clusters.push_back(std::move(cluster));
  }
  sem_post(&grid.workers[grid.random.below(static_cast<uint32_t>(grid.workers.size()))]->turn);
  while (sem_wait(&grid_done) != 0) {
  }
}

}  // namespace

Grid* running = nullptr;

int env_int(const char* name, int fallback) {
  const char* text = std::getenv(name);
  return text == nullptr ? fallback : std::atoi(text);
}

uint64_t seed() {
  static const uint64_t value = [] {
    const char* text = std::getenv("ASTRAI_EMU_SEED");
    const uint64_t chosen =
        text != nullptr ? std::strtoull(text, nullptr, 10) : std::random_device{}();
    std::fprintf(stderr, "emulator: ASTRAI_EMU_SEED=%llu\n",
                 static_cast<unsigned long long>(chosen));
    return chosen;
  }();
  return value;
}

void Grid::assign_next(Cluster& cluster) {
  if (next == order.size()) return;
  const dim3 d = cluster_dim;
  const dim3 in_clusters(config.gridDim.x / d.x, config.gridDim.y / d.y, config.gridDim.z / d.z);
  const uint3 origin = unflatten(order[next++], in_clusters);
  for (uint32_t rank = 0; rank < cluster_size(); ++rank) {
    const uint3 at = unflatten(rank, d);
    cluster.blocks[rank]->assign(
        {origin.x * d.x + at.x, origin.y * d.y + at.y, origin.z * d.z + at.z}, &cluster, rank);
  }
  const dim3 b = config.blockDim;
  cluster.live = static_cast<int>(b.x * b.y * b.z * cluster_size());
  cluster.arrived = 0;
  cluster.phase = 0;
  cluster.waiting.clear();
}

cudaError_t run_launch(const cudaLaunchConfig_t& config, dim3 cluster_dim, bool overlaps,
                       const void* entry, const std::function<void()>& kernel) {
  static std::mutex one_at_a_time;
  static uint64_t launches = 0;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  if (launches == 0) sem_init(&grid_done, 0, 0);
  Grid grid(config, cluster_dim, overlaps, entry, kernel, seed() + 0x10001 * ++launches);
  running = &grid;
  run_grid(grid);
  running = nullptr;
  return cudaSuccess;
}

void fail(const char* format, ...) {
  std::fflush(stdout);
  std::fprintf(stderr, "\nemulator: ");
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "\n");
  if (this_thread != nullptr) {
    std::fprintf(stderr, "  in thread (%u, %u, %u) of block (%u, %u, %u)\n", threadIdx.x,
                 threadIdx.y, threadIdx.z, blockIdx.x, blockIdx.y, blockIdx.z);
  }
  if (running != nullptr) {
    const dim3 g = running->config.gridDim;
    const dim3 b = running->config.blockDim;
    std::fprintf(stderr, "  grid (%u, %u, %u) of blocks (%u, %u, %u)\n", g.x, g.y, g.z, b.x, b.y,
                 b.z);
    for (const Worker* worker : running->workers) worker->block.print_waiting();
  }
  std::fprintf(stderr, "  repeat with ASTRAI_EMU_SEED=%llu\n",
               static_cast<unsigned long long>(seed()));
  std::abort();
}

// ---- Yields -------------------------------------------------------------------------------------

void yield_in_loop() {
  constexpr uint64_t kTooOften = 4'000'000;
  if (++running->idle > kTooOften) {
    fail(
        "livelock: threads only read memory and wait for it to change; if they wait for a block "
        "that does not run yet, see ASTRAI_EMU_CONCURRENT");
  }
  yield();
}

// ---- Programmatic dependent launch --------------------------------------------------------------

void wait_for_previous_grid() { current().waited_for_previous = true; }

void require_wait(const char* what) {
  if (running->overlaps && !current().waited_for_previous) {
    fail("%s before griddepcontrol.wait, in a kernel that may overlap the one before it", what);
  }
}

// ---- Clusters -----------------------------------------------------------------------------------

void Cluster::release_if_complete() {
  if (arrived == 0 || arrived < live) return;
  ++phase;
  arrived = 0;
  for (Thread* thread : waiting) thread->owner->wake(*thread);
  waiting.clear();
}

void Cluster::arrive(Thread& thread) {
  if (thread.cluster_arrived) fail("barrier.cluster.arrive: twice without a wait between");
  thread.cluster_arrived = true;
  thread.cluster_phase = phase;
  ++arrived;
  release_if_complete();
}

void Cluster::exit_thread(Thread& thread) {
  --live;
  if (thread.cluster_arrived && thread.cluster_phase == phase) --arrived;
  release_if_complete();
}

void cluster_arrive() {
  current().owner->cluster().arrive(current());
  yield();
}

void cluster_wait(Place place) {
  Thread& thread = current();
  Cluster& cluster = thread.owner->cluster();
  if (!thread.cluster_arrived) fail("barrier.cluster.wait: without an arrive before it");
  if (thread.cluster_phase == cluster.phase) {
    cluster.waiting.push_back(&thread);
    thread.owner->wait("barrier.cluster.wait", place);
  }
  thread.cluster_arrived = false;
}

uint32_t cluster_rank() { return current().owner->rank(); }
uint32_t cluster_size() { return running->cluster_size(); }

}  // namespace astrai::emulator
