#include "tests/kernels/emulator/memory.h"

#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "tests/kernels/emulator/block.h"

namespace astrai::emulator {
namespace {

constexpr size_t kPage = 4096;
constexpr int kPoison = 0xff;
constexpr uint8_t kCanary = 0x5a;

struct Allocation {
  uint8_t* mapping;  // guard page, canaries, memory, canaries, guard page
  size_t mapping_bytes;
  size_t bytes;
};

std::mutex mutex;
std::map<uint8_t*, Allocation>& allocations() {
  static auto& map = *new std::map<uint8_t*, Allocation>;
  return map;
}

size_t round_up(size_t bytes, size_t step) { return (bytes + step - 1) / step * step; }

void check_canaries(const uint8_t* pointer, const Allocation& a) {
  for (const uint8_t* p = a.mapping + kPage; p < a.mapping + a.mapping_bytes - kPage; ++p) {
    if (p == pointer) p += a.bytes;
    if (p < a.mapping + a.mapping_bytes - kPage && *p != kCanary) {
      fail("a kernel wrote at %td from the start of an allocation of %zu bytes", p - pointer,
           a.bytes);
    }
  }
}

void explain_fault(int signal, siginfo_t* info, void* context) {
  if (this_thread == nullptr) {  // host code: as without a handler
    struct sigaction standard = {};
    standard.sa_handler = SIG_DFL;
    sigaction(signal, &standard, nullptr);
    return;
  }
  auto* address = static_cast<uint8_t*>(info->si_addr);
  const auto& registers = static_cast<const ucontext_t*>(context)->uc_mcontext.gregs;
  const char* access = registers[REG_ERR] & 2 ? "write" : "read";
  if (current().fiber.is_overflow(address)) {
    fail("stack overflow: a thread has %zu bytes", Thread::kStackBytes);
  }
  for (const auto& [pointer, a] : allocations()) {
    if (address < a.mapping || address >= a.mapping + a.mapping_bytes) continue;
    fail("invalid %s at %p, %td bytes from the start of an allocation of %zu bytes", access,
         static_cast<void*>(address), address - pointer, a.bytes);
  }
  fail("invalid %s at %p, which is no device memory (or not aligned)", access,
       static_cast<void*>(address));
}

}  // namespace

void* allocate(size_t bytes) {
  static const size_t alignment = static_cast<size_t>(env_int("ASTRAI_EMU_ALIGN", 256));
  const size_t rounded = round_up(bytes == 0 ? 1 : bytes, alignment);
  const size_t inner = round_up(rounded, kPage);
  void* mapping = mmap(nullptr, inner + 2 * kPage, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) return nullptr;
  uint8_t* start = static_cast<uint8_t*>(mapping) + kPage;
  if (mprotect(start, inner, PROT_READ | PROT_WRITE) != 0) {
    munmap(mapping, inner + 2 * kPage);
    return nullptr;
  }
  uint8_t* pointer = start + inner - rounded;
  std::memset(start, kCanary, inner - rounded);
  std::memset(pointer, kPoison, bytes);
  std::memset(pointer + bytes, kCanary, rounded - bytes);
  const std::lock_guard<std::mutex> lock(mutex);
  allocations()[pointer] = {static_cast<uint8_t*>(mapping), inner + 2 * kPage, bytes};
  return pointer;
}

bool release(void* pointer) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = allocations().find(static_cast<uint8_t*>(pointer));
  if (found == allocations().end()) return false;
  check_canaries(found->first, found->second);
  munmap(found->second.mapping, found->second.mapping_bytes);
  allocations().erase(found);
  return true;
}

bool is_device_memory(const void* pointer, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  auto* p = static_cast<uint8_t*>(const_cast<void*>(pointer));
  auto next = allocations().upper_bound(p);
  if (next == allocations().begin()) return false;
  const auto& [start, a] = *--next;
  const size_t offset = static_cast<size_t>(p - start);
  return offset <= a.bytes && bytes <= a.bytes - offset;
}

void install_fault_handler() {
  // A fault may be a stack overflow, so the handler has a stack of its own.
  constexpr size_t kHandlerStack = 64 << 10;
  stack_t stack = {};
  stack.ss_sp = std::malloc(kHandlerStack);
  stack.ss_size = kHandlerStack;
  sigaltstack(&stack, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = explain_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, nullptr);
  sigaction(SIGBUS, &action, nullptr);
}

}  // namespace astrai::emulator
