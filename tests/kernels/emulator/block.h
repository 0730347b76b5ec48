// Internal to the emulator: threads, blocks, clusters and the grid that runs. See device.h.
#pragma once

#include <semaphore.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tests/kernels/emulator/device.h"
#include "tests/kernels/emulator/fiber.h"

namespace astrai::emulator {

// xorshift64*: small, and the same on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u | 1) {}
  uint32_t below(uint32_t n) {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return static_cast<uint32_t>((state_ * 0x2545f4914f6cdd1du >> 32) * n >> 32);
  }

 private:
  uint64_t state_;
};

struct AsyncCopy {
  void* shared;
  const void* source;
  int bytes;     // read; the rest of 16 is zero
  size_t group;  // number of the group that it belongs to
};

class Block;

struct Thread {
  static constexpr size_t kStackBytes = 256 << 10;
  Thread() : fiber(kStackBytes) {}

  Fiber fiber;
  uint3 index = {};
  int lane = 0;
  Block* owner = nullptr;
  size_t warp = 0;  // of the block
  bool exited = false;
  const char* waits_for = nullptr;  // null: runs or could run
  Place place = {};
  bool cluster_arrived = false;
  uint32_t cluster_phase = 0;
  bool waited_for_previous = false;  // griddepcontrol.wait
  std::vector<AsyncCopy> copies;     // not yet performed
  size_t groups = 0;                 // committed
};

// Lanes of one warp at one operation.
struct WarpWait {
  const WarpOp* op;
  uint32_t mask;
  uint32_t arrived;
  void* data[32];
};

struct Warp {
  uint32_t live = 0;  // lanes that have not exited
  std::vector<WarpWait> waits;
};

struct Cluster {
  std::vector<Block*> blocks;  // by rank
  int live = 0;                // threads that have not exited
  int live_blocks = 0;
  int arrived = 0;
  uint32_t phase = 0;
  std::vector<Thread*> waiting;

  void arrive(Thread& thread);
  void exit_thread(Thread& thread);
  void release_if_complete();
};

// The memory that a worker gives to the blocks it runs, one after the other.
class SharedMemory {
 public:
  SharedMemory();
  // Poisons what the block that starts now may see. On the worker's own OS thread.
  void prepare(const void* entry, size_t dynamic_bytes);
  // Fails if the block wrote behind its dynamic shared memory.
  void check_end() const;
  // Of a pointer of this block, or 0.
  uint32_t address_of(const void* pointer) const;
  // Null if there is no such memory.
  void* at(uint32_t address, size_t bytes) const;
  uint8_t* dynamic() const { return dynamic_; }
  size_t dynamic_bytes() const { return dynamic_bytes_; }

 private:
  uint8_t* arena_;
  uint8_t* dynamic_ = nullptr;
  size_t dynamic_bytes_ = 0;
  const void* entry_ = nullptr;
  uint8_t* statics_ = nullptr;  // thread-local variables of the kernel's program or library
  size_t statics_bytes_ = 0;
};

// One block at a time, on one OS thread.
class Block {
 public:
  // Sets what the block is to be; its threads come to be when it first runs.
  void assign(uint3 index, Cluster* cluster, uint32_t rank);
  bool is_ready() const { return fresh_ || !runnable_.empty(); }
  bool is_fresh() const { return fresh_; }
  bool has_exited() const { return !fresh_ && live_ == 0; }
  // Runs threads until none can run or it is another block's turn.
  void run();

  void wake(Thread& thread);
  // Leaves the running thread, until it is woken.
  void wait(const char* what, Place place);
  void yield();
  int barrier(BarrierKind kind, bool predicate, Place place);
  void warp_rendezvous(const WarpOp& op, uint32_t mask, void* data, Place place);
  void exit_thread(Thread& thread);

  uint32_t rank() const { return rank_; }
  Cluster& cluster() const { return *cluster_; }
  const SharedMemory& shared() const { return shared_; }
  uint32_t live_lanes(size_t warp) const { return warps_[warp].live; }
  void print_waiting() const;

 private:
  void start();
  Thread* pick();
  void switch_away(Thread& from);
  void release_barrier_if_complete();
  bool release_if_complete(size_t warp, size_t which);

  Fiber home_;
  bool fresh_ = false;
  uint3 index_ = {};
  Cluster* cluster_ = nullptr;
  uint32_t rank_ = 0;
  SharedMemory shared_;
  std::vector<std::unique_ptr<Thread>> threads_;  // never shrinks
  size_t thread_count_ = 0;
  size_t live_ = 0;
  std::vector<Thread*> runnable_;
  std::vector<Warp> warps_;
  struct {
    BarrierKind kind = BarrierKind::kSync;
    int true_count = 0;
    int result = 0;
    std::vector<Thread*> waiting;
  } barrier_;
};

// An OS thread and the block that it runs.
struct Worker {
  Block block;
  sem_t turn;
};

// The launch that runs. There is one at a time.
struct Grid {
  Grid(const cudaLaunchConfig_t& config, dim3 cluster_dim, bool overlaps, const void* entry,
       const std::function<void()>& kernel, uint64_t seed)
      : config(config),
        cluster_dim(cluster_dim),
        overlaps(overlaps),
        entry(entry),
        kernel(&kernel),
        random(seed) {}

  cudaLaunchConfig_t config;
  dim3 cluster_dim;
  bool overlaps;  // programmatic dependent launch: threads wait for the kernel before
  const void* entry;
  const std::function<void()>* kernel;
  Random random;
  std::vector<uint32_t> order;  // of clusters
  size_t next = 0;
  std::vector<Worker*> workers;                    // those of one cluster lie side by side
  std::vector<std::unique_ptr<Cluster>> clusters;  // one for each of those groups
  uint64_t idle = 0;                               // yields since something last happened

  uint32_t cluster_size() const { return cluster_dim.x * cluster_dim.y * cluster_dim.z; }
  // Gives the group of workers the next cluster of the grid, if there is one.
  void assign_next(Cluster& cluster);
  // Whether another block should run now.
  bool wants_handoff() { return workers.size() > 1 && random.below(256) == 0; }
};
extern Grid* running;

// The thread that runs; null in host code.
extern Thread* this_thread;
inline Thread& current() { return *this_thread; }

// In shared.cc: the copies of the thread that may or must be performed.
void finish_copies(Thread& thread);

// In grid.cc: runs all blocks. The launch has been checked.
cudaError_t run_launch(const cudaLaunchConfig_t& config, dim3 cluster_dim, bool overlaps,
                       const void* entry, const std::function<void()>& kernel);

uint64_t seed();
int env_int(const char* name, int fallback);

}  // namespace astrai::emulator
