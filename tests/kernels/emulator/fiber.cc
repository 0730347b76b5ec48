#include "tests/kernels/emulator/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <utility>

#ifndef __x86_64__
#error "The emulator switches stacks in x86-64 assembly."
#endif

// Saves what a call must preserve on the stack that it leaves, and takes it from the other one.
// ucontext would do, but makes two system calls a switch.
asm(R"(
.text
.type astrai_emulator_switch, @function
astrai_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size astrai_emulator_switch, .-astrai_emulator_switch

# First instruction of a fiber: entry and argument wait in registers that a switch restores.
.type astrai_emulator_start, @function
astrai_emulator_start:
  movq %r12, %rdi
  callq *%rbx
  ud2
.size astrai_emulator_start, .-astrai_emulator_start
)");

extern "C" {
void astrai_emulator_switch(void** save, void* stack_pointer);
void astrai_emulator_start();
}

namespace astrai::emulator {
namespace {

constexpr size_t kPage = 4096;

}  // namespace

Fiber::Fiber(size_t stack_bytes) : bytes_(kPage + stack_bytes) {
  void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, kPage, PROT_NONE) != 0) {
    std::perror("emulator: stack of a thread");
    std::abort();
  }
  memory_ = static_cast<char*>(memory);
}

Fiber::~Fiber() {
  if (memory_ != nullptr) munmap(memory_, bytes_);
}

Fiber::Fiber(Fiber&& other) noexcept
    : stack_pointer_(other.stack_pointer_),
      memory_(std::exchange(other.memory_, nullptr)),
      bytes_(other.bytes_) {}

void Fiber::reset(void (*entry)(void*), void* argument) {
  // As astrai_emulator_switch pops them; the call in astrai_emulator_start finds the stack aligned
  // to 16 bytes.
  void** top = reinterpret_cast<void**>(memory_ + bytes_) - 9;
  top[0] = nullptr;                                          // r15
  top[1] = nullptr;                                          // r14
  top[2] = nullptr;                                          // r13
  top[3] = argument;                                         // r12
  top[4] = reinterpret_cast<void*>(entry);                   // rbx
  top[5] = nullptr;                                          // rbp
  top[6] = reinterpret_cast<void*>(&astrai_emulator_start);  // return address
  top[7] = nullptr;
  stack_pointer_ = top;
}

void Fiber::switch_to(Fiber& from, Fiber& to) {
  astrai_emulator_switch(&from.stack_pointer_, to.stack_pointer_);
}

bool Fiber::is_overflow(const void* address) const {
  const char* a = static_cast<const char*>(address);
  return memory_ != nullptr && a >= memory_ && a < memory_ + kPage;
}

}  // namespace astrai::emulator
