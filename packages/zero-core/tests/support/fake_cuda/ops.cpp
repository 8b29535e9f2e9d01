// Operators for CUDA tensors, which run the CPU's kernels as jobs. See [Note: fake CUDA].

#include "fake.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/bernoulli_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/mul.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/profiler/combined_traceback.h>
#include <torch/library.h>

#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <unordered_map>

namespace fake {

using at::Tensor;
using c10::Device;
using c10::IValue;
using Stack = torch::jit::Stack;

cudaStream_t current_stream(c10::DeviceIndex device) {
  return c10::cuda::getCurrentCUDAStream(device).stream();
}

std::string python_stack_of_thread() {
  auto taken = torch::CapturedTraceback::gather(true, false, false);
  auto known = torch::symbolize({taken.get()});
  std::ostringstream text;
  for (auto index : known.tracebacks.at(0)) {
    auto& frame = known.all_frames.at(index);
    text << frame.filename << ":" << frame.lineno << " " << frame.funcname << "\n";
  }
  return text.str();
}

void check(cudaError_t error) {
  TORCH_CHECK(error == cudaSuccess, "CUDA error: ", cudaGetErrorString(error));
}

// Traces the caching allocator and overwrites freed blocks with NaN in the order of their stream.
// Another stream that reads a block without record_stream or a wait may read NaN.
void watch_allocator() {
  static std::once_flag once;
  std::call_once(once, [] {
    c10::cuda::CUDACachingAllocator::init(c10::cuda::device_count());
    c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([](const auto& entry) {
      using Entry = std::decay_t<decltype(entry)>;
      auto stream = static_cast<cudaStream_t>(entry.stream_);
      auto* data = reinterpret_cast<void*>(entry.addr_);
      std::vector<Range> block{{entry.addr_, entry.addr_ + entry.size_}};
      // A null stream means the default stream of the current device.
      int old = 0;
      cudaGetDevice(&old);
      if (old != entry.device_) cudaSetDevice(entry.device_);
      if (entry.action_ == Entry::FREE_REQUESTED) note("free", stream, "", {}, block);
      if (entry.action_ == Entry::FREE_COMPLETED) poison(stream, data, entry.size_);
      if (old != entry.device_) cudaSetDevice(old);
    });
  });
}

// Overwrites pinned memory with NaN whenever torch's caching allocator hands it out again.
struct PoisoningAllocator : at::HostAllocator {
  at::HostAllocator& own = *at::getHostAllocator(at::kCUDA);

  c10::DataPtr allocate(size_t size) override {
    c10::DataPtr found = own.allocate(size);
    if (size > 0) memset(found.get(), 0xFF, size);
    return found;
  }
  c10::DeleterFnPtr raw_deleter() const override { return own.raw_deleter(); }
  void copy_data(void* to, const void* from, size_t size) const override {
    own.copy_data(to, from, size);
  }
  bool record_event(void* data, void* context, c10::Stream stream) override {
    return own.record_event(data, context, stream);
  }
  void empty_cache() override { own.empty_cache(); }
  at::HostStats get_stats() override { return own.get_stats(); }
  void reset_accumulated_stats() override { own.reset_accumulated_stats(); }
  void reset_peak_stats() override { own.reset_peak_stats(); }
};

// Returns a CPU tensor over the shadow of a CUDA tensor's memory. The twin does not keep that
// memory alive, so that a job reads NaN if the memory is freed too early.
Tensor twin_of(const Tensor& tensor) {
  auto* base = tensor.storage().unsafeGetStorageImpl();
  c10::DataPtr data(shadow_of(base->mutable_data()), Device(at::kCPU));
  c10::Storage storage(c10::Storage::use_byte_size_t(), base->nbytes(), std::move(data), nullptr,
                       false);
  auto twin = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = twin.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (tensor.is_conj()) impl->_set_conj(true);
  if (tensor.is_neg()) impl->_set_neg(true);
  return twin;
}

void touch(Job& job, const Tensor& tensor, bool is_write) {
  if (tensor.numel() == 0 || !tensor.has_storage()) return;
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); d++) last += (tensor.size(d) - 1) * tensor.stride(d);
  auto base = reinterpret_cast<uintptr_t>(tensor.storage().data()) +
              static_cast<uintptr_t>(tensor.storage_offset()) * tensor.element_size();
  uintptr_t end = base + static_cast<uintptr_t>(last + 1) * tensor.element_size();
  (is_write ? job.writes : job.reads).push_back({base, end});
}

// Submits a job that runs without autograd, on as many CPU threads as the caller uses.
void launch(c10::DeviceIndex device, Job job, std::function<void()> run) {
  check(error_of(device));
  watch_allocator();
  job.run = [run = std::move(run), num_threads = at::get_num_threads()] {
    at::AutoDispatchBelowADInplaceOrView below;
    if (at::get_num_threads() != num_threads) at::set_num_threads(num_threads);
    run();
  };
  submit(current_stream(device), std::move(job));
}

// Returns ``value`` with ``f`` applied to its tensor, or to each tensor of its list.
template <typename F>
IValue mapped(const IValue& value, F f) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> found;
    for (const Tensor& tensor : value.toTensorList()) found.push_back(f(tensor));
    return found;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> found;
    for (std::optional<Tensor> tensor : value.toOptionalTensorList())
      found.push_back(tensor ? std::optional<Tensor>(f(*tensor)) : std::nullopt);
    return found;
  }
  return value;
}

// Returns a host tensor of zeros like the CUDA tensor. Returns other tensors unchanged.
Tensor model_of(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  auto model =
      at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  if (model.numel() > 0) memset(model.storage().mutable_data(), 0, model.storage().nbytes());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    model.unsafeGetTensorImpl()->set_wrapped_number(true);
  return model;
}

struct Form {  // layout and dtype of a result
  bool is_defined;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
};
using FormsAndShells = std::pair<std::vector<Form>, Stack>;
std::mutex& forms_mutex = *new std::mutex;
std::unordered_map<std::string, FormsAndShells>& known_forms =
    *new std::unordered_map<std::string, FormsAndShells>;

// Replaces the arguments on the stack with the results. torch 2.10 drops the arguments before it
// pushes results that refer to them, so the copy keeps the arguments alive.
void run_on_cpu(const c10::OperatorHandle& op, Stack& stack) {
  const Stack kept = stack;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

struct Call {
  const c10::OperatorHandle& op;
  Stack* stack;
  const c10::FunctionSchema& schema;
  size_t num_args, first;
  std::string name;
  Device device{at::kCUDA, -1};
  bool is_functional = false;  // has results that do not alias arguments

  Call(const c10::OperatorHandle& op, Stack* stack)
      : op(op),
        stack(stack),
        schema(op.schema()),
        num_args(schema.arguments().size()),
        first(stack->size() - num_args),
        name(op.operator_name().name) {
    bool has_dims = false;
    for (size_t i = first; i < stack->size(); i++) {
      (void)mapped((*stack)[i], [&](const Tensor& tensor) {
        if (tensor.defined() && tensor.is_cuda() && !has_dims) {
          device = tensor.device();
          has_dims = tensor.dim() > 0;
        }
        return tensor;
      });
      if (device.index() < 0 && (*stack)[i].isDevice()) device = (*stack)[i].toDevice();
    }
    if (device.index() < 0) device = Device(at::kCUDA, c10::cuda::current_device());
    for (auto& result : schema.returns()) is_functional |= !result.alias_info();
  }

  bool is_written(size_t i) const {
    const auto* alias = schema.arguments()[i].alias_info();
    if (!alias) return false;
    const auto& members = alias->containedTypes();  // of a list, as in the _foreach operators
    return alias->isWrite() || (!members.empty() && members[0].isWrite());
  }

  // Returns the arguments for the CPU's kernel: twins of CUDA tensors, clones of host tensors. Adds
  // the CUDA tensors to the job's reads and writes.
  Stack twins(Job& job) {
    Stack found;
    for (size_t i = 0; i < num_args; i++) {
      const IValue& value = (*stack)[first + i];
      const auto& argument = schema.arguments()[i];
      if (value.isDevice()) {
        found.emplace_back(Device(at::kCPU));
      } else if (argument.name() == "generator") {
        found.emplace_back(next_generator(value));
      } else {
        found.push_back(mapped(value, [&](const Tensor& tensor) {
          if (!tensor.defined()) return tensor;
          if (tensor.is_cuda()) {
            TORCH_CHECK(tensor.device() == device, "Expected all tensors of ", op.operator_name(),
                        " on ", device, ", got one on ", tensor.device());
            touch(job, tensor, is_written(i));
            return twin_of(tensor);
          }
          // Of host tensors, torch copies only the indices of x[...] to the device.
          bool is_index = argument.name() == "indices" && !value.isTensor();
          TORCH_CHECK(!is_written(i) && (tensor.dim() == 0 || is_index), "Expected all tensors of ",
                      op.operator_name(), " on ", device, ", got one of ", tensor.numel(),
                      " elements on ", tensor.device());
          return tensor.clone();
        }));
      }
    }
    return found;
  }

  // Returns a new CPU generator, so that a job's random numbers do not depend on when it runs.
  at::Generator next_generator(const IValue& value) const {
    at::Generator given =
        value.isGenerator() ? value.toGenerator() : at::globalContext().defaultGenerator(device);
    std::lock_guard<std::mutex> lock(given.mutex());
    uint64_t offset = given.get_offset();
    given.set_offset(offset + 4);  // CUDA's offsets are multiples of 4
    return at::detail::createCPUGenerator(mixed(mixed(given.current_seed()) ^ offset));
  }

  // Returns a text that determines the shapes, strides and dtypes of the results.
  std::string signature() const {
    std::ostringstream text;
    text << op.operator_name();
    for (size_t i = 0; i < num_args; i++) {
      text << "|";
      bool has_tensors = false;
      const IValue& value = (*stack)[first + i];
      (void)mapped(value, [&](const Tensor& tensor) {
        has_tensors = true;
        if (tensor.defined()) {
          text << tensor.scalar_type() << tensor.sizes() << tensor.strides() << tensor.is_cuda()
               << tensor.unsafeGetTensorImpl()->is_wrapped_number();
        } else {
          text << "-";
        }
        return tensor;
      });
      if (!has_tensors && !value.isGenerator()) text << value;
    }
    return text.str();
  }

  // Returns the forms of the results, and the results with undefined tensors. For a new signature,
  // runs the CPU's kernel on zeros. A meta kernel would differ in details on which later kernels
  // depend, such as the dtype of a layer norm's statistics.
  FormsAndShells forms() const {
    std::string key = signature();
    {
      std::lock_guard<std::mutex> lock(forms_mutex);
      auto known = known_forms.find(key);
      if (known != known_forms.end()) return known->second;
    }
    Stack args;
    for (size_t i = 0; i < num_args; i++) {
      const IValue& value = (*stack)[first + i];
      if (value.isDevice()) {
        args.emplace_back(Device(at::kCPU));
      } else if (value.isGenerator()) {
        args.emplace_back();
      } else {
        args.push_back(mapped(value, model_of));
      }
    }
    Stack given = args;
    run_on_cpu(op, args);
    FormsAndShells found;
    for (auto& value : is_functional ? args : given) {
      found.second.push_back(mapped(value, [&](const Tensor& tensor) {
        if (tensor.defined()) {
          found.first.push_back(
              {true, tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()});
        } else {
          found.first.push_back({false, {}, {}, at::kFloat});
        }
        return Tensor();
      }));
    }
    std::lock_guard<std::mutex> lock(forms_mutex);
    if (known_forms.size() > 20000) known_forms.clear();
    return known_forms[key] = std::move(found);
  }

  void finish(Stack results) {
    stack->resize(first);
    for (auto& result : results) stack->push_back(std::move(result));
  }

  void finish_with_arguments() {
    Stack results;
    for (auto& result : schema.returns()) {
      for (size_t i = 0; i < num_args; i++) {
        const auto* alias = schema.arguments()[i].alias_info();
        if (alias && *alias == *result.alias_info()) {
          results.push_back((*stack)[first + i]);
          break;
        }
      }
    }
    finish(std::move(results));
  }
};

Tensor empty_as(const Form& form, Device device) {
  return at::empty_strided(form.sizes, form.strides,
                           at::TensorOptions().dtype(form.dtype).device(device));
}

// Operators for which the host waits, because it needs the value or shape of their result.
const std::set<std::string>& data_dependent = *new std::set<std::string>{
    "aten::nonzero", "aten::masked_select",      "aten::_unique2",      "aten::_unique",
    "aten::equal",   "aten::unique_consecutive", "aten::bincount",      "aten::unique_dim",
    "aten::histc",   "aten::repeat_interleave",  "aten::nonzero_static"};

// Returns whether the call indexes by a mask, whose set elements the host must count.
bool has_mask(const Call& call) {
  if (call.name.rfind("aten::index", 0) != 0 && call.name != "aten::_index_put_impl_") return false;
  bool found = false;
  for (size_t i = 0; i < call.num_args; i++) {
    const IValue& value = (*call.stack)[call.first + i];
    if (!value.isOptionalTensorList() && !value.isTensorList()) continue;
    (void)mapped(value, [&](const Tensor& tensor) {
      bool is_mask =
          tensor.defined() && (tensor.dtype() == at::kBool || tensor.dtype() == at::kByte);
      found |= is_mask;
      return tensor;
    });
  }
  return found;
}

void run_now(Call& call) {
  check(synchronize(current_stream(call.device.index()), "item"));
  Job unused;
  Stack args = call.twins(unused);
  run_on_cpu(call.op, args);
  Stack results;
  for (auto& value : args) {
    results.push_back(mapped(value, [&](const Tensor& tensor) {
      if (!tensor.defined()) return tensor;
      Tensor out = empty_as(
          {true, tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()}, call.device);
      Job job{call.name};
      touch(job, out, true);
      launch(call.device.index(), std::move(job),
             [target = twin_of(out), tensor]() mutable { target.copy_(tensor); });
      return out;
    }));
  }
  if (call.is_functional) {
    call.finish(std::move(results));
  } else {
    call.finish_with_arguments();
  }
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  Call call(op, stack);
  c10::cuda::CUDAGuard guard(call.device);
  at::AutoDispatchBelowADInplaceOrView below;
  if (data_dependent.count(call.name) || has_mask(call)) return run_now(call);
  Stack results;
  std::vector<Tensor> outs;  // results of a functional operator, with its lists flattened
  bool needs_shape = call.is_functional;
  for (size_t i = 0; i < call.num_args; i++) {
    const IValue& value = (*stack)[call.first + i];
    bool is_out = call.schema.arguments()[i].is_out();
    needs_shape |= is_out && value.isTensor() && value.toTensor().numel() == 0;
  }
  if (needs_shape) {
    auto [forms, shells] = call.forms();
    size_t next = 0;
    if (call.is_functional) {
      for (auto& shell : shells) {
        results.push_back(mapped(shell, [&](const Tensor&) {
          const Form& form = forms.at(next++);
          outs.push_back(form.is_defined ? empty_as(form, call.device) : Tensor());
          return outs.back();
        }));
      }
    } else {
      for (size_t i = 0; i < call.num_args; i++) {
        (void)mapped((*stack)[call.first + i], [&](const Tensor& tensor) {
          const Form& form = forms.at(next++);
          if (call.is_written(i) && tensor.numel() == 0) tensor.resize_(form.sizes);
          return tensor;
        });
      }
    }
  }
  Job job{call.name};
  Stack args = call.twins(job);
  std::vector<Tensor> targets;
  for (auto& out : outs) {
    if (out.defined()) touch(job, out, true);
    targets.push_back(out.defined() ? twin_of(out) : Tensor());
  }
  launch(call.device.index(), std::move(job),
         [op, args = std::move(args), targets = std::move(targets)]() mutable {
           run_on_cpu(op, args);
           size_t next = 0;
           for (auto& value : args) {
             (void)mapped(value, [&](const Tensor& tensor) {
               if (next < targets.size() && targets[next].defined()) targets[next].copy_(tensor);
               next++;
               return tensor;
             });
           }
         });
  if (call.is_functional) {
    call.finish(std::move(results));
  } else {
    call.finish_with_arguments();
  }
}

// Only a copy within a device is a job here. torch's copy_ calls cudaMemcpyAsync for other copies.
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (!self.is_cuda() || !source.is_cuda() || self.device() != source.device()) {
    std::optional<Waiting> waiting;
    if (!non_blocking) waiting.emplace("copy");
    return at::native::copy_(self, source, non_blocking);
  }
  if (self.numel() == 0) return self;
  c10::cuda::CUDAGuard guard(self.device());
  Job job{"aten::copy_", Kind::copy};
  touch(job, source, false);
  touch(job, self, true);
  launch(self.device().index(), std::move(job),
         [to = twin_of(self), from = twin_of(source)]() mutable { to.copy_(from); });
  return self;
}

at::Scalar local_scalar(const Tensor& self) {
  c10::cuda::CUDAGuard guard(self.device());
  cudaStream_t stream = current_stream(self.device().index());
  if (self.numel() > 0) {
    Job read;
    touch(read, self, false);
    note("launch", stream, "item", read.reads, {});
  }
  check(synchronize(stream, "item"));
  at::AutoDispatchBelowADInplaceOrView below;
  return twin_of(self).item();
}

void record_stream(Tensor& self, c10::Stream stream) {
  c10::cuda::CUDAGuard guard(self.device());
  auto data = reinterpret_cast<uintptr_t>(self.storage().data());
  c10::cuda::CUDAStream user(stream);
  note("record_stream", user.stream(), "", {{data, data + self.storage().nbytes()}}, {});
  c10::cuda::CUDACachingAllocator::recordStream(self.storage().data_ptr(), user);
}

// Computes dropout as a mask and a product, in place of CUDA's fused kernel.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p,
                                          std::optional<bool> train) {
  if (!train.value_or(true))
    return {input.clone(), at::empty_like(input, input.options().dtype(at::kBool)).fill_(true)};
  Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

int64_t choose_math_attention(const Tensor&, const Tensor&, const Tensor&,
                              const std::optional<Tensor>&, double, bool, std::optional<double>,
                              bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

// Operators that keep torch's CUDA kernel because it touches no values or only calls operators, and
// operators for which `replace_kernels` registers a function.
const std::set<std::string> own_kernels{
    "empty",           "empty_strided",       "resize_",        "set_",
    "_pin_memory",     "is_pinned",           "as_strided",     "view",
    "unfold",          "record_stream",       "_reshape_alias", "copy_",
    "_resize_output_", "_local_scalar_dense", "native_dropout", "_fused_sdp_choice",
    "view_as_real",    "view_as_complex",     "is_set_to",      "_has_same_storage_numel",
    "multinomial"};

// Composite operators that launch a kernel by themselves.
const std::set<std::string> launching_composites{"ldexp"};

struct Silence : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// Replaces each CUDA kernel with `fallback` if the CPU has a kernel, except views and own_kernels.
torch::Library* replace_kernels() {
  Silence silence;  // torch warns of each replaced kernel
  c10::WarningUtils::WarningHandlerGuard guard(&silence);
  auto* lib =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0 || own_kernels.count(name.name.substr(6))) continue;
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema()) continue;
    bool has_kernel = op->hasKernelForDispatchKey(c10::DispatchKey::CUDA);
    if (!has_kernel && !launching_composites.count(name.name.substr(6))) continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
        !op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd))
      continue;
    bool is_view = false;
    for (auto& result : op->schema().returns())
      is_view |= result.alias_info() && !result.alias_info()->isWrite();
    if (is_view) continue;
    std::string full =
        name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    lib->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  lib->impl("copy_", &copy_);
  lib->impl("_local_scalar_dense", &local_scalar);
  lib->impl("record_stream", &record_stream);
  lib->impl("native_dropout", &native_dropout);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_math_attention);
  set_stack_source(&python_stack_of_thread);
  at::setHostAllocator(at::kCUDA, new PoisoningAllocator, 255);
  return lib;
}

torch::Library* replaced = replace_kernels();

}  // namespace fake
