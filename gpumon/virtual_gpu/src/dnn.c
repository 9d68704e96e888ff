/* dnn.c - cuDNN and CUPTI entry points for the virtual GPU.
 * Descriptors are dummies, one engine / one algorithm is always found, every workspace is 0 bytes, execution is a no-op.
 * So the shapes are right and the convolution workspaces that a real cuDNN would ask for are missing.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#define API __attribute__((visibility("default")))
#define OK 0
static int fresh(void **d) { *d = calloc(1, 256); return OK; }
#define CREATE(n) API int n(void **d) { return fresh(d); }
API int cudnnCreate(void **h) { return fresh(h); }
CREATE(cudnnCreateActivationDescriptor) CREATE(cudnnCreateConvolutionDescriptor) CREATE(cudnnCreateDropoutDescriptor)
CREATE(cudnnCreateFilterDescriptor) CREATE(cudnnCreatePoolingDescriptor) CREATE(cudnnCreateTensorDescriptor)
CREATE(cudnnCreateCTCLossDescriptor) CREATE(cudnnCreateRNNDescriptor) CREATE(cudnnCreateRNNDataDescriptor)
CREATE(cudnnCreateSpatialTransformerDescriptor)
API int cudnnSetStream(void *h, void *s) { *(void **)h = s; return OK; }
API int cudnnGetStream(void *h, void **s) { *s = *(void **)h; return OK; }
API size_t cudnnGetCudartVersion(void) { return 13020; }

/* graph API (used through cudnn_frontend by PyTorch's v8 convolutions and cuDNN attention) */
API int cudnnBackendCreateDescriptor(int type, void **d) { return fresh(d); }
API int cudnnBackendDestroyDescriptor(void *d) { free(d); return OK; }
API int cudnnBackendFinalize(void *d) { return OK; }
API int cudnnBackendExecute(void *h, void *plan, void *pack) { return OK; }
API int cudnnBackendSetAttribute(void *d, int name, int type, int64_t n, const void *v) { return OK; }
API int cudnnBackendGetAttribute(void *d, int name, int type, int64_t want, int64_t *got, void *out) {
  int64_t n = want;
  if (type == 11 || type == 19) n = 0;                      /* numerical / behaviour notes: none */
  else if (type == 15) n = 1;                               /* one engine configuration */
  else if (out) memset(out, 0, want * (type == 2 || type == 24 ? 1 : type == 3 || type == 5 || type == 6 || type == 0 ? 8 : 4));
  if (got) *got = n;
  return OK;
}

/* legacy API */
typedef struct { int algo, status; float time; size_t memory; int determinism, mathType, reserved[3]; } perf_t;
static int one(int *got, perf_t *p, int algo) { memset(p, 0, sizeof *p); p->algo = algo; *got = 1; return OK; }
typedef void *P;
API int cudnnGetConvolutionForwardAlgorithm_v7(P h, P a, P b, P c, P d, int n, int *got, perf_t *p) { return one(got, p, 1); }
API int cudnnGetConvolutionBackwardDataAlgorithm_v7(P h, P a, P b, P c, P d, int n, int *got, perf_t *p) { return one(got, p, 1); }
API int cudnnGetConvolutionBackwardFilterAlgorithm_v7(P h, P a, P b, P c, P d, int n, int *got, perf_t *p) { return one(got, p, 1); }
API int cudnnFindConvolutionForwardAlgorithmEx(P h, P a, P ap, P b, P bp, P c, P d, P dp, int n, int *got, perf_t *p, P ws, size_t s) { return one(got, p, 1); }
API int cudnnFindConvolutionBackwardDataAlgorithmEx(P h, P a, P ap, P b, P bp, P c, P d, P dp, int n, int *got, perf_t *p, P ws, size_t s) { return one(got, p, 1); }
API int cudnnFindConvolutionBackwardFilterAlgorithmEx(P h, P a, P ap, P b, P bp, P c, P d, P dp, int n, int *got, perf_t *p, P ws, size_t s) { return one(got, p, 1); }
API int cudnnGetConvolutionForwardWorkspaceSize(P h, P a, P b, P c, P d, int al, size_t *n) { *n = 0; return OK; }
API int cudnnGetConvolutionBackwardDataWorkspaceSize(P h, P a, P b, P c, P d, int al, size_t *n) { *n = 0; return OK; }
API int cudnnGetConvolutionBackwardFilterWorkspaceSize(P h, P a, P b, P c, P d, int al, size_t *n) { *n = 0; return OK; }
API int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(P h, int m, int o, P x, P z, P y, P s, P a, size_t *n) { *n = 0; return OK; }
API int cudnnGetBatchNormalizationBackwardExWorkspaceSize(P h, int m, int o, P x, P y, P dy, P dz, P dx, P s, P a, size_t *n) { *n = 0; return OK; }
API int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(P h, int m, int o, P a, P x, size_t *n) { *n = 0; return OK; }
API int cudnnDropoutGetStatesSize(P h, size_t *n) { *n = 1 << 20; return OK; }

/* The real libcupti recurses without end when libcuda.so.1 is not NVIDIA's: say "not available" and the profiler
 * (torch.profiler with ProfilerActivity.CUDA) carries on without GPU activities. */
API int cuptiGetVersion(uint32_t *v) { *v = 0; return 15; }
