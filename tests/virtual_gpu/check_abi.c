/* Compile-time only: every layout of src/abi.h against NVIDIA's own headers. */
#include <cuda_runtime_api.h>
#include <cublasLt.h>
#include <stddef.h>

#include "abi.h"

#define SAME(member) _Static_assert(offsetof(struct cudaDeviceProp, member) == offsetof(device_properties, member), #member)

SAME(uuid);
SAME(totalGlobalMem);
SAME(regsPerBlock);
SAME(maxGridSize);
SAME(totalConstMem);
SAME(major);
SAME(multiProcessorCount);
SAME(surfaceAlignment);
SAME(pciBusID);
SAME(l2CacheSize);
SAME(maxThreadsPerMultiProcessor);
SAME(sharedMemPerMultiprocessor);
SAME(cooperativeLaunch);
SAME(sharedMemPerBlockOptin);
SAME(maxBlocksPerMultiProcessor);
SAME(reservedSharedMemPerBlock);
SAME(memoryPoolsSupported);

_Static_assert(sizeof(struct cudaDeviceProp) == sizeof(device_properties), "cudaDeviceProp");
_Static_assert(sizeof(struct cudaFuncAttributes) == sizeof(function_attributes), "cudaFuncAttributes");
_Static_assert(offsetof(struct cudaFuncAttributes, binaryVersion) == offsetof(function_attributes, binaryVersion), "binaryVersion");
_Static_assert(sizeof(struct cudaPointerAttributes) == sizeof(pointer_attributes), "cudaPointerAttributes");
_Static_assert(offsetof(cudaLaunchConfig_t, stream) == offsetof(launch_config, stream), "cudaLaunchConfig_t");
_Static_assert(sizeof(cublasLtMatmulHeuristicResult_t) == sizeof(matmul_heuristic), "heuristic result");
_Static_assert(offsetof(cublasLtMatmulHeuristicResult_t, state) == offsetof(matmul_heuristic, state), "state");
