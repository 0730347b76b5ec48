// A torch tensor as a kernel sees it, read and checked without any symbol of torch.
//
//     Call call("attn_decode", Devices::kCuda);
//     TensorView q = call.input(args[0], "q");          // read only
//     TensorView out = call.output(args[6], "out");     // written by the kernel
//     require_dtype(call, q, {ScalarType::kBFloat16, ScalarType::kFloat16});
//     ...
//     call.finish();                                     // bumps the version counters of outputs
//
// A Call refuses, with a message that names function and argument:
//   * what is not exactly torch.Tensor or Parameter (lists, arrays, None, subclasses): TypeError;
//   * tensors without memory of their own (functional, vmap, meta): TypeError;
//   * sparse and quantized layouts, a set conj or neg bit: TypeError;
//   * tensors on a device of the wrong kind, or not all on one device: RuntimeError;
//   * with grad mode on, an argument that requires grad: RuntimeError with the word "autograd".
#pragma once

#include <Python.h>
#include <dlpack/dlpack.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "python/bindings/errors.h"
#include "python/bindings/torch_api.h"

namespace astrai::bindings {

enum class ScalarType : int {
  kBFloat16,
  kFloat16,
  kFloat32,
  kFloat64,
  kFloat8E4M3,
  kFloat8E5M2,
  kBool,
  kUInt8,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kComplex,
  kOther,
};

// torch's spelling, such as "torch.bfloat16".
const char* name_of(ScalarType dtype);
// Bytes of one element; 0 for kComplex and kOther, which no kernel takes.
int64_t size_of(ScalarType dtype);

constexpr int kMaxRank = 8;

struct TensorView {
  const char* name = nullptr;  // of the argument
  void* data = nullptr;        // first element; may be null if numel() == 0
  int rank = 0;
  // Strides are in elements. A dimension of size 1 has the stride that it would have in a
  // contiguous tensor: torch keeps whatever stride such a dimension once had.
  std::array<int64_t, kMaxRank> shape{};
  std::array<int64_t, kMaxRank> strides{};
  ScalarType dtype = ScalarType::kOther;
  DLDevice device{kDLCPU, 0};

  int64_t numel() const;
  bool is_contiguous() const;
  // Elements between the first and the last one in memory, both counted; 0 without elements.
  int64_t span() const;
  // "(2, 1, 32, 128)"
  std::string shape_text() const;
  std::string strides_text() const;
};

std::string device_text(DLDevice device);

enum class Devices { kCuda, kAny /* for tests on machines without a GPU */ };

// The tensors of one call of one function.
class Call {
 public:
  explicit Call(const char* function, Devices devices = Devices::kCuda);
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // Reads an argument that the kernel does not write.
  TensorView input(PyObject* object, const char* name);
  // Reads an argument that the kernel writes: no two of its elements may share memory.
  TensorView output(PyObject* object, const char* name);

  // Tells autograd that the outputs were written.
  void finish();

  const char* function() const { return function_; }
  // Of all tensors read so far.
  DLDevice device() const { return device_; }
  // torch's current stream of that device; null on the CPU.
  void* stream() const;

 private:
  TensorView read(PyObject* object, const char* name);

  static constexpr int kMaxOutputs = 8;

  const TorchApi& torch_;
  const char* function_;
  Devices devices_;
  bool grad_enabled_;
  bool has_device_ = false;
  DLDevice device_{kDLCPU, 0};
  std::array<PyObject*, kMaxOutputs> outputs_{};  // borrowed from the caller's arguments
  int output_count_ = 0;
};

// --- Checks. Each throws PythonError with the exception set. -------------------------------------

void require_dtype(const Call& call, const TensorView& view,
                   std::initializer_list<ScalarType> allowed);
// The same dtype as `other`.
void require_same_dtype(const Call& call, const TensorView& view, const TensorView& other);
// `layout` names the dimensions in messages, such as "[batch, seq, heads, head_dim]".
void require_rank(const Call& call, const TensorView& view, int rank, const char* layout);
// Exact sizes; `layout` as above.
void require_shape(const Call& call, const TensorView& view, std::initializer_list<int64_t> shape,
                   const char* layout);
// Sizes below 2^31 in every dimension.
void require_int_sizes(const Call& call, const TensorView& view);
void require_contiguous(const Call& call, const TensorView& view);
// Stride 1 in the last dimension.
void require_dense_rows(const Call& call, const TensorView& view);
// First element and every stride but the last on multiples of `bytes`.
void require_alignment(const Call& call, const TensorView& view, int64_t bytes);
// An output that shares memory with an input, as far as ranges can prove it: two dense tensors
// whose bytes meet. Slices that interleave in one buffer pass.
void require_no_overlap(const Call& call, const TensorView& output, const TensorView& input);

// The same bytes in the same order.
bool same_memory(const TensorView& a, const TensorView& b);

// Python bool or number arguments.
bool read_bool(const char* function, PyObject* object, const char* name);
double read_double(const char* function, PyObject* object, const char* name);
int64_t read_int(const char* function, PyObject* object, const char* name);

// A dequantisation step: None (both stay as they are), a finite float above 0, or an fp32 tensor of
// one element.
void read_step(Call& call, PyObject* object, const char* name, float* number,
               const float** pointer);

}  // namespace astrai::bindings
