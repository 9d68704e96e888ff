// The storages of many tensors in one call, for native_storages.py. In Python each tensor takes 0.2 to 1.3 µs.
//
// Python's headers are often not installed: see quiet_hooks.cpp.
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>

#include <cstdint>

using PyObject = struct _object;
extern "C" {
void Py_DecRef(PyObject*);
PyObject* PyObject_Type(PyObject*);
intptr_t PyList_Size(PyObject*);
PyObject* PyList_GetItem(PyObject*, intptr_t);
}

namespace {

struct Storage {
  int64_t identity;  // UntypedStorage._cdata
  int64_t bytes;
};

// Writes the storage of `tensor`, if it is on `device` and has bytes. False: Python must look.
bool add(const c10::TensorImpl& tensor, int64_t device, Storage*& end) {
  if (tensor.is_python_dispatch() || tensor.is_meta() || !tensor.has_storage()) return false;
  if (tensor.get_device() != device) return true;
  const auto* storage = tensor.unsafe_storage().unsafeGetStorageImpl();
  const auto bytes = static_cast<int64_t>(storage->nbytes());
  if (bytes != 0) *end++ = {reinterpret_cast<int64_t>(storage), bytes};
  return true;
}

// at::Tensor is an intrusive_ptr, as wide as a pointer; its header takes a minute to compile.
const c10::TensorImpl& gradient(const c10::TensorImpl& tensor) {
  return **reinterpret_cast<c10::TensorImpl* const*>(&tensor.grad());
}

}  // namespace

extern "C" {

// Of each tensor of a list, or of its gradient, if there is one; the caller holds the GIL. `types`: those whose memory is
// a storage of their own. `found` has place for one of each. Returns how many were written; -1: one of them is not that
// plain.
int64_t gpumon_storages(PyObject* tensors, bool gradients, int64_t device, PyObject* const* types, int impl_at,
                        Storage* found) {
  auto* end = found;
  const auto count = PyList_Size(tensors);
  try {
    for (intptr_t at = 0; at < count; ++at) {
      auto* object = PyList_GetItem(tensors, at);
      auto* type = PyObject_Type(object);
      Py_DecRef(type);  // the object still has it
      if (type != types[0] && type != types[1]) return -1;
      const auto& tensor = **reinterpret_cast<c10::TensorImpl* const*>(reinterpret_cast<const char*>(object) + impl_at);
      if (!gradients) {
        if (!add(tensor, device, end)) return -1;
        continue;
      }
      const auto& its = gradient(tensor);
      if (&its != c10::UndefinedTensorImpl::singleton() && !add(its, device, end)) return -1;
    }
  } catch (...) {  // symbolic sizes
    return -1;
  }
  return end - found;
}
}
