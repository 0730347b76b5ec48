// The execution model: threads that are fibers, blocks of them, and where they wait for each other.
//
// Only one thread runs at a time, in the whole process, and it runs until it waits, exits, or calls
// yield(). Which thread runs next is drawn from the seed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include <cuda_runtime_api.h>

namespace astrai::emulator {

// Place of a call in the source, for messages.
struct Place {
  const char* file;
  int line;

  static constexpr Place here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

// Runs all blocks of the grid, or records them. `entry` identifies the kernel.
cudaError_t launch(const cudaLaunchConfig_t& config, const void* entry,
                   std::function<void()> kernel);

// ---- Called by threads --------------------------------------------------------------------------

// Ends the process with a message that names the running thread and block, and the seed.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Where threads can notice each other in global memory: others, also of other blocks, may run
// first.
void yield();
// The same for a thread that waits for memory to change. Ends the process if all do only that.
void yield_in_loop();

// Random numbers of the running grid, for ptx.cc: true once in n times.
bool one_in(uint32_t n);

enum class BarrierKind { kSync, kCount, kAnd, kOr };
// Waits for all threads of the block that have not exited; combines the predicates.
int block_barrier(BarrierKind kind, bool predicate, Place place);

// A warp operation: waits for the lanes of `mask` that have not exited. The last to arrive calls
// run(data, lanes): data[lane] is what the lanes of `lanes` passed.
struct WarpOp {
  const char* name;
  void (*run)(void* const data[32], uint32_t lanes);
};
void warp_rendezvous(const WarpOp& op, uint32_t mask, void* data, Place place);

// Lanes of `mask` that wait for nothing in particular: __activemask.
uint32_t live_lanes();
int lane_index();

// griddepcontrol.wait, and what may only happen after it in a launch that overlaps the one before.
void wait_for_previous_grid();
void require_wait(const char* what);

void cluster_arrive();
void cluster_wait(Place place);
uint32_t cluster_rank();
uint32_t cluster_size();

// ---- Shared memory ------------------------------------------------------------------------------

extern uint8_t* dynamic_smem;  // of the block that runs
// The 32-bit address of shared memory; fails if the pointer leads elsewhere.
uint32_t shared_address(const void* pointer);
// The address of the same place in a block of the cluster.
uint32_t map_shared_address(uint32_t address, uint32_t rank);
// `bytes` at an address of this block, or of the cluster if that is allowed; fails if they are not
// in shared memory or not aligned to `alignment`.
enum class Window { kBlock, kCluster };
void* resolve_shared(uint32_t address, size_t bytes, size_t alignment, const char* instruction,
                     Window window = Window::kBlock);

// ---- Asynchronous copies ------------------------------------------------------------------------

void async_copy(void* shared, const void* source, int bytes);
void async_commit();
void async_wait(size_t newest_left);

}  // namespace astrai::emulator
