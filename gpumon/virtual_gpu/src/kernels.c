/* Kernels: registered, configured, counted, never run. Also modules, as Triton loads them. */
#include <string.h>

#include "gpu.h"

/* ---- what nvcc's generated code calls at start and before a launch */

static __thread struct {
  dim3_t grid, block;
  size_t shared;
  void *stream;
} pending;

/* The first fat binaries that are registered are PyTorch's: they tell for which architectures it was built. The layouts
   are those of fatbinary_section.h and of what `cuobjdump --list-elf` lists: kind, header's and payload's size, sm. */
enum { SECTION_MAGIC = 0x466243b1, FATBIN_MAGIC = 0xba55ed50, KIND_PTX = 1, KIND_ELF = 2, BINARIES_MAX = 8 };

typedef struct {
  unsigned magic, version;
  const void *data, *more;
} fatbin_section;

typedef struct {
  unsigned magic;
  unsigned short version, header_size;
  u64 size;
} fatbin_header;

typedef struct {
  unsigned short kind, version;
  unsigned header_size;
  u64 size;
  unsigned compressed_size, options;
  unsigned short minor, major;
  unsigned architecture;
} fatbin_entry;

static const fatbin_section *binaries[BINARIES_MAX];
static int binary_count;

API void **__cudaRegisterFatBinary(void *binary) {
  static void *handle[1];
  const fatbin_section *section = binary;
  int at = section && section->magic == SECTION_MAGIC ? __atomic_fetch_add(&binary_count, 1, __ATOMIC_RELAXED) : -1;
  if (at >= 0 && at < BINARIES_MAX) binaries[at] = section;
  return handle;
}

/* Looks for what the device would run: machine code of its major version, not newer than itself, or PTX. */
static void look_into(const fatbin_section *section, int capability, int *code, int *ptx, int *known) {
  const fatbin_header *header = section->data;
  if (!header || header->magic != FATBIN_MAGIC) return;
  const char *at = (const char *)header + header->header_size, *end = at + header->size;
  while (at + sizeof(fatbin_entry) <= end) {
    const fatbin_entry *entry = (const fatbin_entry *)at;
    int architecture = (int)entry->architecture;
    if (!entry->header_size || (entry->kind != KIND_PTX && entry->kind != KIND_ELF)) return;
    *known = 1;
    if (architecture <= capability) {
      int *best = entry->kind == KIND_PTX ? ptx : architecture / 10 == capability / 10 ? code : 0;
      if (best && architecture > *best) *best = architecture;
    }
    at += entry->header_size + entry->size;
  }
}

/* The architecture whose code a device runs; 0: there is none. Where no fat binary was understood: its own. */
static int architecture(int ordinal, int *is_ptx) {
  static int found[MAX_DEVICES], ptx_found[MAX_DEVICES]; /* architecture + 1 */
  if (!__atomic_load_n(&found[ordinal], __ATOMIC_ACQUIRE)) {
    const device_info *device = vgpu_device(ordinal);
    int capability = device->major * 10 + device->minor, code = 0, ptx = 0, known = 0;
    for (int i = 0; i < BINARIES_MAX && binaries[i]; i++) look_into(binaries[i], capability, &code, &ptx, &known);
    int best = !known ? capability : code ? code : ptx;
    ptx_found[ordinal] = known && !code && ptx;
    __atomic_store_n(&found[ordinal], best + 1, __ATOMIC_RELEASE);
  }
  if (is_ptx) *is_ptx = ptx_found[ordinal];
  return found[ordinal] - 1;
}

API void __cudaRegisterFatBinaryEnd(void **handle) {}
API void __cudaUnregisterFatBinary(void **handle) {}

API void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *a,
                                void *b, void *c, void *d, int *e) {
  vgpu_register_kernel(host, name);
}

API void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t size,
                           int constant, int global) {}

API void __cudaRegisterManagedVar(void **handle, void **host, char *device, const char *name, int external, size_t size,
                                  int constant, int global) {}

API char __cudaInitModule(void **handle) { return 1; }

API unsigned __cudaPushCallConfiguration(dim3_t grid, dim3_t block, size_t shared, void *stream) {
  pending.grid = grid;
  pending.block = block;
  pending.shared = shared;
  pending.stream = stream;
  return 0;
}

API int __cudaPopCallConfiguration(dim3_t *grid, dim3_t *block, size_t *shared, void **stream) {
  *grid = pending.grid;
  *block = pending.block;
  *shared = pending.shared;
  *stream = pending.stream;
  return SUCCESS;
}

API int __cudaGetKernel(const void **kernel, const void *function) {
  *kernel = function;
  return SUCCESS;
}

/* ---- launches */

static __thread int all_was_launched;

int vgpu_all_was_launched(void) { return all_was_launched; }

static int launch(void **parameters, void *stream_handle) {
  all_was_launched = 0;
  vgpu_forget_reachable_uploads(parameters);
  return vgpu_launch(stream_handle);
}

/* Of a kernel that was compiled with the library that launches it. */
static int launch_compiled(const void *kernel, dim3_t grid, void **parameters, void *stream_handle) {
  int status = vgpu_check_device();
  if (status) return status;
  if (!architecture(vgpu_current, 0)) return vgpu_fail(ERROR_NO_KERNEL_IMAGE);
  if (!vgpu_stream(stream_handle)->capturing && vgpu_compute(kernel, grid.y, parameters)) {
    all_was_launched = 0;
    return vgpu_launch(stream_handle);
  }
  status = launch(parameters, stream_handle);
  all_was_launched = vgpu_is_all(kernel);
  return status;
}

API int cudaLaunchKernel(const void *kernel, dim3_t grid, dim3_t block, void **parameters, size_t shared, void *s) {
  return launch_compiled(kernel, grid, parameters, s);
}

API int __cudaLaunchKernel(const void *kernel, dim3_t grid, dim3_t block, void **parameters, size_t shared, void *s) {
  return launch_compiled(kernel, grid, parameters, s);
}

API int cudaLaunchCooperativeKernel(const void *kernel, dim3_t grid, dim3_t block, void **parameters, size_t shared,
                                    void *s) {
  return launch_compiled(kernel, grid, parameters, s);
}

API int cudaLaunchKernelExC(const launch_config *config, const void *kernel, void **parameters) {
  return launch_compiled(kernel, config->grid, parameters, config->stream);
}

API int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                       unsigned shared, void *s, void **parameters, void **extra) {
  return launch(parameters, s);
}

API int cuLaunchCooperativeKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                  unsigned bz, unsigned shared, void *s, void **parameters) {
  return launch(parameters, s);
}

/* CUlaunchConfig: seven unsigned, then the stream */
API int cuLaunchKernelEx(const unsigned *config, void *function, void **parameters, void **extra) {
  void *s;
  memcpy(&s, config + 8, sizeof s);
  return launch(parameters, s);
}

/* ---- attributes and occupancy: invented, one answer for all kernels */

API int cudaFuncSetAttribute(const void *function, int attribute, int value) { return SUCCESS; }
API int cudaFuncSetCacheConfig(const void *function, int config) { return SUCCESS; }
API int cudaKernelSetAttributeForDevice(const void *kernel, int attribute, int value, int device) { return SUCCESS; }

API int cudaFuncGetAttributes(function_attributes *attributes, const void *function) {
  int status = vgpu_check_device();
  if (status) return status;
  const device_info *device = vgpu_device(vgpu_current);
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  int is_ptx, built_for = architecture(vgpu_current, &is_ptx);
  if (!built_for) return vgpu_fail(ERROR_NO_KERNEL_IMAGE);
  attributes->ptxVersion = built_for;
  attributes->binaryVersion = is_ptx ? device->major * 10 + device->minor : built_for;
  attributes->maxDynamicSharedSizeBytes = 48 << 10;
  return SUCCESS;
}

API int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads, size_t shared) {
  int fit = threads > 0 ? 2048 / threads : 1;
  *blocks = fit < 1 ? 1 : fit > 32 ? 32 : fit;
  return SUCCESS;
}

API int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads,
                                                               size_t shared, unsigned flags) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}

API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads, size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}

API int cuOccupancyMaxActiveClusters(int *clusters, void *function, const void *config) {
  *clusters = 8;
  return SUCCESS;
}

/* ---- modules: anything loads */

API int cuModuleLoadData(void **module, const void *image) {
  *module = calloc(1, 16);
  return SUCCESS;
}

API int cuModuleLoadDataEx(void **module, const void *image, unsigned count, void *options, void *values) {
  return cuModuleLoadData(module, image);
}

API int cuModuleLoad(void **module, const char *file) { return cuModuleLoadData(module, file); }

API int cuModuleUnload(void *module) {
  free(module);
  return SUCCESS;
}

API int cuModuleGetFunction(void **function, void *module, const char *name) {
  *function = module;
  return SUCCESS;
}

API int cuFuncGetAttribute(int *value, int attribute, void *function) {
  *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0; /* threads a block, registers; nothing spilled */
  return SUCCESS;
}

API int cuFuncSetAttribute(void *function, int attribute, int value) { return SUCCESS; }
API int cuFuncSetCacheConfig(void *function, int config) { return SUCCESS; }
API int cuTensorMapEncodeTiled(void) { return SUCCESS; }
API int cuTensorMapEncodeIm2col(void) { return SUCCESS; }
