// Device memory between guard pages. Internal to the emulator.
#pragma once

#include <cstddef>

namespace astrai::emulator {

// Memory that ends at a guard page, filled with 0xff. Null if there is none. The pointer is aligned
// to 256 bytes, so up to 255 bytes lie between the end and the guard page (ASTRAI_EMU_ALIGN=16
// leaves less).
void* allocate(size_t bytes);
// False if the pointer does not come from allocate. Fails if a kernel wrote beside the memory.
bool release(void* pointer);
// Whether `bytes` from `pointer` lie in one allocation.
bool is_device_memory(const void* pointer, size_t bytes);

// Explains what a kernel did when it touches a guard page. For each OS thread that runs kernels.
void install_fault_handler();

}  // namespace astrai::emulator
