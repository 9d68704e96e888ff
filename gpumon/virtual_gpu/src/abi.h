/* The facts of NVIDIA's binary interface that this library relies on: status codes and the layout of a few structs.
 *
 * No CUDA header is needed to build. tests/virtual_gpu/check_abi.c compares every layout with NVIDIA's own headers
 * where those are installed. CUDA 13 dropped the members that are conditional here.
 */
#ifndef VGPU_ABI_H
#define VGPU_ABI_H

#include <stddef.h>

#define API __attribute__((visibility("default")))

/* cudaError_t and CUresult agree on these values. */
enum {
  SUCCESS = 0,
  ERROR_INVALID_VALUE = 1,
  ERROR_OUT_OF_MEMORY = 2,
  ERROR_NO_DEVICE = 100,
  ERROR_INVALID_DEVICE = 101,
  ERROR_NO_KERNEL_IMAGE = 209,
  ERROR_NOT_FOUND = 500,
  ERROR_NOT_READY = 600,
  ERROR_PEER_ACCESS_ALREADY_ENABLED = 704,
  ERROR_LAUNCH_FAILURE = 719,
  ERROR_NOT_SUPPORTED = 801,
};

/* cudaMemoryType; the last one is ours: address space of cuMemAddressReserve. */
enum { MEMORY_HOST = 1, MEMORY_DEVICE = 2, MEMORY_MANAGED = 3, MEMORY_RESERVED = 9 };

typedef struct {
  unsigned x, y, z;
} dim3_t;

/* struct cudaDeviceProp */
typedef struct {
  char name[256];
  char uuid[16];
  char luid[8];
  unsigned luidDeviceNodeMask;
  size_t totalGlobalMem;
  size_t sharedMemPerBlock;
  int regsPerBlock;
  int warpSize;
  size_t memPitch;
  int maxThreadsPerBlock;
  int maxThreadsDim[3];
  int maxGridSize[3];
#if VGPU_CUDA_VERSION < 13000
  int clockRate;
#endif
  size_t totalConstMem;
  int major;
  int minor;
  size_t textureAlignment;
  size_t texturePitchAlignment;
#if VGPU_CUDA_VERSION < 13000
  int deviceOverlap;
#endif
  int multiProcessorCount;
#if VGPU_CUDA_VERSION < 13000
  int kernelExecTimeoutEnabled;
#endif
  int integrated;
  int canMapHostMemory;
#if VGPU_CUDA_VERSION < 13000
  int computeMode;
#endif
  int textures[39 + (VGPU_CUDA_VERSION < 13000)];
  size_t surfaceAlignment;
  int concurrentKernels;
  int ECCEnabled;
  int pciBusID;
  int pciDeviceID;
  int pciDomainID;
  int tccDriver;
  int asyncEngineCount;
  int unifiedAddressing;
#if VGPU_CUDA_VERSION < 13000
  int memoryClockRate;
#endif
  int memoryBusWidth;
  int l2CacheSize;
  int persistingL2CacheMaxSize;
  int maxThreadsPerMultiProcessor;
  int streamPrioritiesSupported;
  int globalL1CacheSupported;
  int localL1CacheSupported;
  size_t sharedMemPerMultiprocessor;
  int regsPerMultiprocessor;
  int managedMemory;
  int isMultiGpuBoard;
  int multiGpuBoardGroupID;
  int hostNativeAtomicSupported;
#if VGPU_CUDA_VERSION < 13000
  int singleToDoublePrecisionPerfRatio;
#endif
  int pageableMemoryAccess;
  int concurrentManagedAccess;
  int computePreemptionSupported;
  int canUseHostPointerForRegisteredMem;
  int cooperativeLaunch;
#if VGPU_CUDA_VERSION < 13000
  int cooperativeMultiDeviceLaunch;
#endif
  size_t sharedMemPerBlockOptin;
  int pageableMemoryAccessUsesHostPageTables;
  int directManagedMemAccessFromHost;
  int maxBlocksPerMultiProcessor;
  int accessPolicyMaxWindowSize;
  size_t reservedSharedMemPerBlock;
  int hostRegisterSupported;
  int sparseCudaArraySupported;
  int hostRegisterReadOnlySupported;
  int timelineSemaphoreInteropSupported;
  int memoryPoolsSupported;
  int remaining[71];
} device_properties;

/* struct cudaFuncAttributes */
typedef struct {
  size_t sharedSizeBytes;
  size_t constSizeBytes;
  size_t localSizeBytes;
  int maxThreadsPerBlock;
  int numRegs;
  int ptxVersion;
  int binaryVersion;
  int cacheModeCA;
  int maxDynamicSharedSizeBytes;
  int remaining[23];
} function_attributes;

/* struct cudaPointerAttributes */
typedef struct {
  int type;
  int device;
  void *devicePointer;
  void *hostPointer;
#if VGPU_CUDA_VERSION >= 13000
  long reserved[8];
#endif
} pointer_attributes;

/* struct cudaLaunchConfig_t, as far as the stream */
typedef struct {
  dim3_t grid;
  dim3_t block;
  size_t dynamicSmemBytes;
  void *stream;
} launch_config;

/* cublasLtMatmulHeuristicResult_t */
typedef struct {
  unsigned long long algo[8];
  size_t workspaceSize;
  int state;
  float wavesCount;
  int reserved[4];
} matmul_heuristic;

#endif
