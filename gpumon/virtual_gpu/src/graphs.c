/* Stream capture and CUDA graphs: a captured graph remembers how many launches it holds, and replays their number. */
#include "gpu.h"

typedef struct {
  u64 launches;
} graph;

static u64 capture_ids = 1;

static int new_graph(void **out, u64 launches) {
  graph *created = calloc(1, sizeof *created);
  created->launches = launches;
  *out = created;
  return SUCCESS;
}

/* ---- capture */

API int cudaStreamIsCapturing(void *handle, int *status) {
  *status = vgpu_stream(handle)->capturing;
  return SUCCESS;
}

API int cudaStreamGetCaptureInfo(void *handle, int *status, u64 *id, void **out, const void **dependencies,
                                 const void **edges, size_t *count) {
  stream *queue = vgpu_stream(handle);
  *status = queue->capturing;
  if (id) *id = queue->capture_id;
  if (out) *out = queue->capturing ? (void *)queue : 0;
  if (dependencies) *dependencies = 0;
  if (edges) *edges = 0;
  if (count) *count = 0;
  return SUCCESS;
}

/* CUDA 12's form, without edges */
API int cudaStreamGetCaptureInfo_v2(void *handle, int *status, u64 *id, void **out, const void **dependencies,
                                    size_t *count) {
  return cudaStreamGetCaptureInfo(handle, status, id, out, dependencies, 0, count);
}

API int cudaStreamBeginCapture(void *handle, int mode) {
  stream *queue = vgpu_stream(handle);
  queue->capturing = 1;
  queue->captured_launches = 0;
  queue->capture_id = __atomic_fetch_add(&capture_ids, 1, __ATOMIC_RELAXED);
  return SUCCESS;
}

API int cudaStreamBeginCaptureToGraph(void *handle, void *into, const void *dependencies, const void *edges,
                                      size_t count, int mode) {
  return cudaStreamBeginCapture(handle, mode);
}

API int cudaStreamEndCapture(void *handle, void **out) {
  stream *queue = vgpu_stream(handle);
  queue->capturing = 0;
  return out ? new_graph(out, queue->captured_launches) : SUCCESS;
}

API int cudaStreamUpdateCaptureDependencies(void *handle, void *dependencies, const void *edges, size_t count,
                                            unsigned flags) {
  return SUCCESS;
}

API int cudaThreadExchangeStreamCaptureMode(int *mode) {
  static __thread int current;
  int previous = current;
  current = *mode;
  *mode = previous;
  return SUCCESS;
}

/* ---- graphs */

API int cudaGraphCreate(void **out, unsigned flags) { return new_graph(out, 0); }

/* Kept: an executable graph and PyTorch's own handle may outlive each other, and a graph here is eight bytes. */
API int cudaGraphDestroy(void *handle) { return SUCCESS; }

API int cudaGraphInstantiate(void **out, void *handle, u64 flags) {
  return new_graph(out, handle ? ((graph *)handle)->launches : 0);
}

API int cudaGraphInstantiateWithFlags(void **out, void *handle, u64 flags) {
  return cudaGraphInstantiate(out, handle, flags);
}

API int cudaGraphExecDestroy(void *handle) {
  free(handle);
  return SUCCESS;
}

API int cudaGraphLaunch(void *handle, void *stream_handle) {
  int status = SUCCESS;
  for (u64 i = 0; i < ((graph *)handle)->launches && !status; i++) status = vgpu_launch(stream_handle);
  return status;
}

/* Only their number is asked for, to warn of an empty graph. */
API int cudaGraphGetNodes(void *handle, void **nodes, size_t *count) {
  *count = nodes ? 0 : ((graph *)handle)->launches;
  return SUCCESS;
}

API int cudaGraphNodeGetDependencies(void *node, void *dependencies, void *edges, size_t *count) {
  *count = 0;
  return SUCCESS;
}

API int cudaGraphRetainUserObject(void *handle, void *object, unsigned count, unsigned flags) { return SUCCESS; }

API int cudaUserObjectCreate(void **out, void *pointer, void *destructor, unsigned count, unsigned flags) {
  *out = pointer;
  return SUCCESS;
}

API int cudaUserObjectRelease(void *object, unsigned count) { return SUCCESS; }
