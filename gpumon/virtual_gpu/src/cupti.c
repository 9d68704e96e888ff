/* CUPTI, which the profiler asks first: not initialized, so that it goes on without the device's activities.
 *
 * The real library recurses without end when libcuda.so.1 is not NVIDIA's, so it must not be reached.
 */
#include "gpu.h"

#define CUPTI_NOT_INITIALIZED 15

API int cuptiGetVersion(uint32_t *version) {
  *version = 0;
  return CUPTI_NOT_INITIALIZED;
}

API int cuptiGetResultString(int status, const char **text) {
  *text = "CUPTI is not available on the virtual GPU";
  return SUCCESS;
}
