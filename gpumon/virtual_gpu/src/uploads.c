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

void vgpu_note_upload(const void *start, size_t size) {
  uintptr_t first = (uintptr_t)start, end = first + size;
  pthread_mutex_lock(&mutex);
  forget_overlapping(first, end);
  ranges[next_place] = (range){first, end};
  next_place = (next_place + 1) % REMEMBERED;
  if (first < lowest) lowest = first;
  if (end > highest) highest = end;
  pthread_mutex_unlock(&mutex);
}

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

int vgpu_is_upload(const void *start, size_t size) {
  uintptr_t first = (uintptr_t)start;
  int found = 0;
  pthread_mutex_lock(&mutex);
  for (int i = 0; i < REMEMBERED && !found; i++) found = ranges[i].start <= first && first + size <= ranges[i].end;
  pthread_mutex_unlock(&mutex);
  return found;
}

/* The sizes that an object collective exchanges (all_gather_object): one int64 a rank, all equal here, whose maximum a
 * kernel takes before the host reads it. So until the next gather, each of them may be read, and one number that is not
 * known may be their reduction, if a kernel had a pointer to them. */
static struct {
  range at;
  int64_t number;
  int reads, reductions;
} gathered;

void vgpu_note_gathered(const void *start, size_t size) {
  pthread_mutex_lock(&mutex);
  gathered.at = (range){(uintptr_t)start, (uintptr_t)start + size};
  gathered.number = *(const int64_t *)start;
  gathered.reads = size / sizeof(int64_t);
  gathered.reductions = 1;
  pthread_mutex_unlock(&mutex);
}

int vgpu_gathered(const void *from, int64_t *number) {
  uintptr_t at = (uintptr_t)from;
  int known = 0;
  pthread_mutex_lock(&mutex);
  if (gathered.at.start <= at && at < gathered.at.end) {
    known = gathered.reads-- > 0;
  } else if (gathered.reductions) {
    int untouched = 0;
    for (int i = 0; i < REMEMBERED && !untouched; i++) {
      untouched = ranges[i].start <= gathered.at.start && gathered.at.start < ranges[i].end;
    }
    known = !untouched;
    gathered.reductions -= known;
  }
  *number = gathered.number;
  pthread_mutex_unlock(&mutex);
  return known;
}

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
