// A fiber: a stack and a place to continue on it. Switching costs a few nanoseconds.
#pragma once

#include <cstddef>

namespace astrai::emulator {

class Fiber {
 public:
  // The context that a thread of the operating system starts in: it has a stack already.
  Fiber() = default;
  explicit Fiber(size_t stack_bytes);
  ~Fiber();
  Fiber(Fiber&& other) noexcept;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Lets the fiber start over: the next switch to it calls entry(argument), which must not return.
  void reset(void (*entry)(void*), void* argument);

  // Leaves `from`, which runs, and continues `to`.
  static void switch_to(Fiber& from, Fiber& to);

  // Whether an address lies in the guard page below the stack.
  bool is_overflow(const void* address) const;

 private:
  void* stack_pointer_ = nullptr;
  char* memory_ = nullptr;  // a guard page, then the stack
  size_t bytes_ = 0;
};

}  // namespace astrai::emulator
