/* Which device bytes are known: the host wrote them, and no kernel launched since had a pointer to them.
 *
 * The last uploads are remembered as ranges. A launch drops every range that one of the kernel's parameters points
 * into. How long the parameters are is not known here, so the words around them are looked at too: that may drop a
 * range too many, whose scalars then read as zeros, which is what any other scalar reads as.
 */
#include "gpu.h"

#define REMEMBERED 256
#define MAX_PARAMETERS 16
#define NEARBY_BYTES 2048         /* parameters lie together on the launching function's stack */
#define LAST_PARAMETER_BYTES 1536 /* a reduction keeps its output pointer behind two offset calculators */

typedef struct {
  uintptr_t start, end;
  int is_message; /* what ranks tell each other, which is copied whole */
} range;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static range ranges[REMEMBERED]; /* a ring; an empty range is a free place */
static int next_place;
static uintptr_t lowest = UINTPTR_MAX, highest; /* around all of them: nearly no word on a stack lies between */

static void forget(range *place) {
  place->start = place->end = 0;
}

static void forget_overlapping(uintptr_t start, uintptr_t end) {
  for (int i = 0; i < REMEMBERED; i++) {
    if (ranges[i].start < end && start < ranges[i].end) forget(&ranges[i]);
  }
}

static void note(const void *start, size_t size, int is_message) {
  uintptr_t first = (uintptr_t)start, end = first + size;
  pthread_mutex_lock(&mutex);
  forget_overlapping(first, end);
  ranges[next_place] = (range){first, end, is_message};
  next_place = (next_place + 1) % REMEMBERED;
  if (first < lowest) lowest = first;
  if (end > highest) highest = end;
  pthread_mutex_unlock(&mutex);
}

void vgpu_note_upload(const void *start, size_t size) { note(start, size, 0); }
void vgpu_note_message(const void *start, size_t size) { note(start, size, 1); }

void vgpu_forget_upload(const void *start, size_t size) {
  pthread_mutex_lock(&mutex);
  forget_overlapping((uintptr_t)start, (uintptr_t)start + size);
  pthread_mutex_unlock(&mutex);
}

void vgpu_forget_all_uploads(void) {
  pthread_mutex_lock(&mutex);
  forget_overlapping(0, UINTPTR_MAX);
  lowest = UINTPTR_MAX;
  highest = 0;
  pthread_mutex_unlock(&mutex);
}

/* How many bytes are known from the address on, in one range or several that follow on each other. */
static size_t known_from(const void *pointer, size_t size, int only_messages) {
  uintptr_t first = (uintptr_t)pointer, at = first, before = 0;
  pthread_mutex_lock(&mutex);
  while (at != before && at < first + size) {
    before = at;
    for (int i = 0; i < REMEMBERED && at == before; i++) {
      if (ranges[i].start <= at && at < ranges[i].end && (ranges[i].is_message || !only_messages)) at = ranges[i].end;
    }
  }
  pthread_mutex_unlock(&mutex);
  return at - first < size ? at - first : size;
}

size_t vgpu_known_bytes(const void *start, size_t size) { return known_from(start, size, 0); }
int vgpu_is_upload(const void *start, size_t size) { return known_from(start, size, 0) == size; }
int vgpu_is_message(const void *start, size_t size) { return known_from(start, size, 1) == size; }

static void forget_pointed_to(const uintptr_t *words, const uintptr_t *end) {
  for (; words < end; words++) {
    if (*words < lowest || *words >= highest) continue;
    pthread_mutex_lock(&mutex);
    forget_overlapping(*words, *words + 1);
    pthread_mutex_unlock(&mutex);
  }
}

void vgpu_forget_reachable_uploads(void **parameters) {
  if (!highest || !parameters || !parameters[0]) return;
  uintptr_t first = (uintptr_t)parameters[0], last = first;
  for (int i = 1; i < MAX_PARAMETERS; i++) {
    uintptr_t at = (uintptr_t)parameters[i]; /* past the last parameter: any word, taken only if it is nearby */
    if (at + NEARBY_BYTES < first || at > first + NEARBY_BYTES) break;
    if (at < first) first = at;
    if (at > last) last = at;
  }
  first = vgpu_round_up(first, sizeof first);
  forget_pointed_to((const uintptr_t *)first, (const uintptr_t *)(last + LAST_PARAMETER_BYTES));
}
