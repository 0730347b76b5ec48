// Shared memory: one arena for each block that runs at the time, its 32-bit addresses, and the
// asynchronous copies into it.
#include <link.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/kernels/emulator/block.h"

namespace astrai::emulator {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kArenaBytes = 256 << 10;
constexpr int kPoison = 0xff;
constexpr uint8_t kCanary = 0xa5;
constexpr size_t kAlignment = 128;  // of dynamic shared memory, and no more

// 32-bit addresses: dynamic memory, static memory, and in the upper byte 1 + the rank of the block
// for addresses that mapa made.
constexpr uint32_t kDynamicBase = 1024 + kAlignment;
constexpr uint32_t kStaticBase = 4 << 20;
constexpr int kRankShift = 24;

// Thread-local variables, in the calling OS thread, of the program or library that holds `entry`.
struct ThreadLocals {
  uintptr_t entry;
  uint8_t* base;
  size_t bytes;
};

int find_thread_locals(dl_phdr_info* info, size_t, void* result) {
  ThreadLocals& found = *static_cast<ThreadLocals*>(result);
  bool holds_entry = false;
  size_t bytes = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr) & header = info->dlpi_phdr[i];
    const uintptr_t start = info->dlpi_addr + header.p_vaddr;
    if (header.p_type == PT_TLS) bytes = header.p_memsz;
    if (header.p_type == PT_LOAD && found.entry - start < header.p_memsz) holds_entry = true;
  }
  if (!holds_entry) return 0;
  found.base = static_cast<uint8_t*>(info->dlpi_tls_data);
  found.bytes = found.base == nullptr ? 0 : bytes;
  return 1;
}

}  // namespace

SharedMemory::SharedMemory() {
  void* memory = mmap(nullptr, kArenaBytes + 2 * kPage, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED ||
      mprotect(static_cast<uint8_t*>(memory) + kPage, kArenaBytes, PROT_READ | PROT_WRITE) != 0) {
    std::perror("emulator: shared memory");
    std::abort();
  }
  arena_ = static_cast<uint8_t*>(memory) + kPage;
}

void SharedMemory::prepare(const void* entry, size_t dynamic_bytes) {
  dynamic_bytes_ = dynamic_bytes;
  const size_t rounded = (dynamic_bytes + kAlignment - 1) / kAlignment * kAlignment;
  // Up to a guard page, but an odd multiple of the alignment that a kernel may count on.
  dynamic_ = arena_ + kArenaBytes - rounded;
  if (reinterpret_cast<uintptr_t>(dynamic_) % (2 * kAlignment) == 0) dynamic_ -= kAlignment;
  std::memset(dynamic_, kPoison, dynamic_bytes);
  std::memset(dynamic_ + dynamic_bytes, kCanary,
              static_cast<size_t>(arena_ + kArenaBytes - dynamic_) - dynamic_bytes);

  if (entry != entry_) {
    ThreadLocals locals = {reinterpret_cast<uintptr_t>(entry), nullptr, 0};
    dl_iterate_phdr(find_thread_locals, &locals);
    entry_ = entry;
    statics_ = locals.base;
    statics_bytes_ = locals.bytes;
  }
  // Worker threads run kernels only: what is thread-local there is shared memory.
  if (statics_ != nullptr) std::memset(statics_, kPoison, statics_bytes_);
}

void SharedMemory::check_end() const {
  for (const uint8_t* p = dynamic_ + dynamic_bytes_; p < arena_ + kArenaBytes; ++p) {
    if (*p != kCanary) {
      fail("the block wrote %td bytes behind its %zu bytes of dynamic shared memory",
           p - (dynamic_ + dynamic_bytes_), dynamic_bytes_);
    }
  }
}

uint32_t SharedMemory::address_of(const void* pointer) const {
  const auto p = reinterpret_cast<uintptr_t>(pointer);
  const auto dynamic = reinterpret_cast<uintptr_t>(dynamic_);
  const auto statics = reinterpret_cast<uintptr_t>(statics_);
  if (p - dynamic <= dynamic_bytes_) return kDynamicBase + static_cast<uint32_t>(p - dynamic);
  if (p - statics < statics_bytes_) return kStaticBase + static_cast<uint32_t>(p - statics);
  return 0;
}

void* SharedMemory::at(uint32_t address, size_t bytes) const {
  const auto inside = [&](uint32_t base, size_t size) {
    return address >= base && address - base <= size && size - (address - base) >= bytes;
  };
  if (inside(kDynamicBase, dynamic_bytes_)) return dynamic_ + (address - kDynamicBase);
  if (inside(kStaticBase, statics_bytes_)) return statics_ + (address - kStaticBase);
  return nullptr;
}

uint8_t* dynamic_smem = nullptr;

uint32_t shared_address(const void* pointer) {
  const uint32_t address = current().owner->shared().address_of(pointer);
  if (address == 0) fail("__cvta_generic_to_shared: %p is not in shared memory", pointer);
  return address;
}

uint32_t map_shared_address(uint32_t address, uint32_t rank) {
  if (address >> kRankShift != 0) fail("mapa: %#x is no address of this block", address);
  if (rank >= cluster_size()) fail("mapa: rank %u of a cluster of %u", rank, cluster_size());
  return address | (rank + 1) << kRankShift;
}

void* resolve_shared(uint32_t address, size_t bytes, size_t alignment, const char* instruction,
                     Window window) {
  const Block* block = current().owner;
  const uint32_t mapped = address >> kRankShift;
  const uint32_t local = address & ((1u << kRankShift) - 1);
  if (mapped != 0) {
    if (window != Window::kCluster || mapped > cluster_size()) {
      fail("%s: %#x is no address of this block", instruction, address);
    }
    block = block->cluster().blocks[mapped - 1];
    if (block->is_fresh()) {
      fail("%s: the block of rank %u has not started; a cluster barrier has to come first",
           instruction, mapped - 1);
    }
    if (block->has_exited()) fail("%s: the block of rank %u has exited", instruction, mapped - 1);
  }
  void* pointer = block->shared().at(local, bytes);
  if (pointer == nullptr) {
    fail(
        "%s: shared address %#x (%td from the start of the %zu bytes of dynamic memory) is out of "
        "range",
        instruction, address, static_cast<ptrdiff_t>(local) - static_cast<ptrdiff_t>(kDynamicBase),
        block->shared().dynamic_bytes());
  }
  if (local % alignment != 0 || reinterpret_cast<uintptr_t>(pointer) % alignment != 0) {
    fail("%s: shared address %#x is not aligned to %zu bytes", instruction, address, alignment);
  }
  return pointer;
}

// ---- Asynchronous copies ------------------------------------------------------------------------

namespace {

void perform(const AsyncCopy& copy) {
  uint8_t data[16] = {};
  if (copy.bytes > 0) std::memcpy(data, copy.source, static_cast<size_t>(copy.bytes));
  std::memcpy(copy.shared, data, sizeof(data));
}

// Performs those copies of the thread that `ready` names.
template <typename Ready>
void perform_if(Thread& thread, Ready ready) {
  size_t kept = 0;
  for (const AsyncCopy& copy : thread.copies) {
    if (ready(copy)) {
      perform(copy);
    } else {
      thread.copies[kept++] = copy;
    }
  }
  thread.copies.resize(kept);
}

}  // namespace

// A copy may land at any time between its issue and the wait for it. Most land as late as they may,
// which shows a missing wait; some at once, which shows that the place was still in use.
void async_copy(void* shared, const void* source, int bytes) {
  Thread& thread = current();
  const AsyncCopy copy = {shared, source, bytes, thread.groups};
  if (one_in(8)) {
    perform(copy);
  } else {
    thread.copies.push_back(copy);
  }
}

void async_commit() { ++current().groups; }

void async_wait(size_t newest_left) {
  Thread& thread = current();
  perform_if(thread, [&](const AsyncCopy& copy) {
    return copy.group + newest_left < thread.groups || one_in(8);
  });
}

void finish_copies(Thread& thread) {
  perform_if(thread, [](const AsyncCopy&) { return true; });
}

}  // namespace astrai::emulator
