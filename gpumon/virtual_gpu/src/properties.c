/* What a device is: its properties and attributes, as PyTorch and Triton ask for them. */
#include <stdio.h>
#include <string.h>

#include "gpu.h"

/* 56470<device>-…: what CUDA_VISIBLE_DEVICES takes and NVML answers. A whole board and a MIG instance alike. */
static void fill_uuid(char *uuid, int device) {
  memset(uuid, 0, 16);
  uuid[0] = 0x56;
  uuid[1] = 0x47;
  uuid[3] = (char)device;
  uuid[15] = 1;
}

static int threads_of_a_processor(const device_info *device) {
  int capability = device->major * 10 + device->minor;
  return capability == 86 || capability == 89 || capability == 120 ? 1536 : capability == 75 ? 1024 : 2048;
}

API int cudaGetDeviceProperties(device_properties *p, int ordinal) {
  if (ordinal < 0 || ordinal >= vgpu_devices()) return vgpu_fail(ERROR_INVALID_DEVICE);
  const device_info *device = vgpu_device(ordinal);
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", device->name);
  fill_uuid(p->uuid, vgpu_physical(ordinal));
  p->totalGlobalMem = device->total;
  p->sharedMemPerBlock = 48 << 10;
  p->regsPerBlock = 65536;
  p->warpSize = 32;
  p->memPitch = 0x7fffffff;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 0x7fffffff;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->major = device->major;
  p->minor = device->minor;
  p->textureAlignment = p->surfaceAlignment = 512;
  p->texturePitchAlignment = 32;
  p->multiProcessorCount = device->processors;
  p->canMapHostMemory = p->concurrentKernels = p->ECCEnabled = 1;
  p->pciBusID = device->gpu + 1;
  p->asyncEngineCount = 3;
  p->unifiedAddressing = 1;
  p->memoryBusWidth = 5120;
  p->l2CacheSize = device->l2_mib << 20;
  p->maxThreadsPerMultiProcessor = threads_of_a_processor(device);
  p->streamPrioritiesSupported = p->globalL1CacheSupported = p->localL1CacheSupported = 1;
  p->sharedMemPerMultiprocessor = (size_t)device->shared_kib << 10;
  p->regsPerMultiprocessor = 65536;
  p->managedMemory = p->concurrentManagedAccess = p->computePreemptionSupported = 1;
  p->canUseHostPointerForRegisteredMem = p->cooperativeLaunch = 1;
  p->sharedMemPerBlockOptin = (size_t)device->shared_block_kib << 10;
  p->maxBlocksPerMultiProcessor = 32;
  p->reservedSharedMemPerBlock = 1024;
  p->hostRegisterSupported = p->memoryPoolsSupported = 1;
  return SUCCESS;
}

API int cudaGetDeviceProperties_v2(device_properties *p, int ordinal) {
  return cudaGetDeviceProperties(p, ordinal);
}

/* cudaDeviceAttr and CUdevice_attribute share their numbers. Attributes that nobody asked for yet answer 0, "no". */
API int cudaDeviceGetAttribute(int *value, int attribute, int ordinal) {
  static __thread device_properties p;
  int status = cudaGetDeviceProperties(&p, ordinal);
  if (status) return status;
  switch (attribute) {
    case 1: *value = p.maxThreadsPerBlock; break;
    case 2: case 3: *value = p.maxThreadsDim[0]; break;
    case 4: *value = p.maxThreadsDim[2]; break;
    case 5: *value = p.maxGridSize[0]; break;
    case 6: case 7: *value = p.maxGridSize[1]; break;
    case 8: *value = (int)p.sharedMemPerBlock; break;
    case 9: *value = (int)p.totalConstMem; break;
    case 10: *value = p.warpSize; break;
    case 12: *value = p.regsPerBlock; break;
    case 13: *value = 1410000; break; /* clock, kHz */
    case 14: *value = (int)p.textureAlignment; break;
    case 16: *value = p.multiProcessorCount; break;
    case 33: *value = p.pciBusID; break;
    case 36: *value = 1215000; break; /* memory clock, kHz */
    case 37: *value = p.memoryBusWidth; break;
    case 38: *value = p.l2CacheSize; break;
    case 39: *value = p.maxThreadsPerMultiProcessor; break;
    case 40: *value = p.asyncEngineCount; break;
    case 75: *value = p.major; break;
    case 76: *value = p.minor; break;
    case 81: *value = (int)p.sharedMemPerMultiprocessor; break;
    case 82: *value = p.regsPerMultiprocessor; break;
    case 97: *value = (int)p.sharedMemPerBlockOptin; break;
    case 106: *value = p.maxBlocksPerMultiProcessor; break;
    case 111: *value = (int)p.reservedSharedMemPerBlock; break;
    case 19: case 31: case 32: case 41:                   /* mapped host memory, concurrency, ECC, one address space */
    case 78: case 79: case 80: case 83:                   /* stream priorities, L1 caches, managed memory */
    case 89: case 90: case 91: case 95:                   /* concurrent managed access, preemption, cooperation */
    case 99: case 102: case 115: *value = 1; break;       /* host registration, virtual memory, pools */
    default: *value = 0;
  }
  return SUCCESS;
}
