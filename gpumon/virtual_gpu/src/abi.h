/* abi.h - layouts of the few CUDA structs the shim fills in (facts of the ABI; check_abi.c compares them with
 * NVIDIA's headers where those are installed). */
#ifndef VGPU_ABI_H
#define VGPU_ABI_H
#include <stddef.h>
/* Layout of struct cudaDeviceProp; CUDA 13 dropped some members of CUDA 12 (check_abi.c verifies it). */
typedef struct {
  char name[256]; char uuid[16]; char luid[8]; unsigned luidMask;
  size_t totalGlobalMem, sharedMemPerBlock;
  int regsPerBlock, warpSize; size_t memPitch;
  int maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3];
#if VGPU_CUDA_VERSION < 13000
  int clockRate;
#endif
  size_t totalConstMem; int major, minor;
  size_t textureAlignment, texturePitchAlignment;
#if VGPU_CUDA_VERSION < 13000
  int deviceOverlap;
#endif
  int multiProcessorCount;
#if VGPU_CUDA_VERSION < 13000
  int kernelExecTimeoutEnabled;
#endif
  int integrated, canMapHostMemory;
#if VGPU_CUDA_VERSION < 13000
  int computeMode;
#endif
  int textures[39 + (VGPU_CUDA_VERSION < 13000)]; size_t surfaceAlignment;
  int concurrentKernels, ECCEnabled, pciBusID, pciDeviceID, pciDomainID, tccDriver, asyncEngineCount, unifiedAddressing;
#if VGPU_CUDA_VERSION < 13000
  int memoryClockRate;
#endif
  int memoryBusWidth, l2CacheSize, persistingL2CacheMaxSize, maxThreadsPerMultiProcessor, streamPrioritiesSupported,
      globalL1CacheSupported, localL1CacheSupported;
  size_t sharedMemPerMultiprocessor;
  int regsPerMultiprocessor, managedMemory, isMultiGpuBoard, multiGpuBoardGroupID, hostNativeAtomicSupported;
#if VGPU_CUDA_VERSION < 13000
  int singleToDoublePrecisionPerfRatio;
#endif
  int pageableMemoryAccess, concurrentManagedAccess, computePreemptionSupported, canUseHostPointerForRegisteredMem, cooperativeLaunch;
#if VGPU_CUDA_VERSION < 13000
  int cooperativeMultiDeviceLaunch;
#endif
  size_t sharedMemPerBlockOptin;
  int pageableMemoryAccessUsesHostPageTables, directManagedMemAccessFromHost, maxBlocksPerMultiProcessor, accessPolicyMaxWindowSize;
  size_t reservedSharedMemPerBlock;
  int hostRegisterSupported, sparse, hostRegisterReadOnlySupported, timelineSemaphore, memoryPoolsSupported, tail[71];
} prop_t;
typedef struct { size_t shared, cnst, local; int maxThreads, regs, ptx, bin, ca, maxDyn, rest[23]; } funcattr_t;
typedef struct {
  int type, device; void *devicePointer, *hostPointer;
#if VGPU_CUDA_VERSION >= 13000
  long reserved[8];
#endif
} ptrattr_t;
typedef struct { unsigned long long algo[8]; size_t workspace; int state; float waves; int reserved[4]; } ltres_t;
#endif
