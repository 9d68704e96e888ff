/* Work that waits for other ranks: what a collective will bring, and copies and sums of it that were queued meanwhile.
 *
 * A real device would come to them in the order of the streams while the host goes on. Here the host does them where it
 * waits for a stream, or looks at bytes that something queued here will write. Nothing is written early that something
 * queued before would still read or write. The lock is never held while waiting: another thread of this process may have
 * to say what the rank that is waited for waits for.
 */
#include "waiting.h"

#include <string.h>
#include <time.h>

#define FULL 1024 /* a device's queue is not longer either: whoever launches more waits for the oldest */
#define LOOK_AFTER 64
#define LOOK_FOR_MISSING 50000000ll /* nanoseconds between two looks at whether ranks live: each reads /proc */

typedef struct {
  u64 ticket; /* 0: no receipt */
  int lane;
  receipt receipt;
  local_work work;
  int wanted;
} item;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static item **items; /* in the order they were queued */
static int count, capacity;
static u64 tickets;

/* ---- which bytes an item writes and reads */

typedef struct {
  uintptr_t start, end;
} span;

static span spans(const void *start, size_t size) {
  return (span){(uintptr_t)start, start ? (uintptr_t)start + size : 0};
}

static int overlap(span a, span b) { return a.start < b.end && b.start < a.end; }

static span written_by(const item *i) {
  const receipt *r = &i->receipt;
  if (!i->ticket) return spans(i->work.to, i->work.to_size);
  return spans(r->to, r->part * (r->is_spread ? r->when.at->ranks : 1));
}

static span read_by(const item *i, int which) {
  return i->ticket ? spans(0, 0) : spans(i->work.from[which], i->work.from_size[which]);
}

static int must_follow(const item *later, const item *earlier) {
  span writes = written_by(later), wrote = written_by(earlier);
  if (overlap(writes, wrote)) return 1;
  for (int i = 0; i < 2; i++) {
    if (overlap(read_by(later, i), wrote) || overlap(writes, read_by(earlier, i))) return 1;
  }
  return 0;
}

static int follows_any(const item *later, int before) {
  for (int i = 0; i < before; i++) {
    if (must_follow(later, items[i])) return 1;
  }
  return 0;
}

/* ---- doing an item */

/* What was made of these bytes is as unknown as they are. */
static void spoil(span unknown, int after) {
  vgpu_forget_upload((void *)unknown.start, unknown.end - unknown.start);
  for (int i = after; i < count; i++) {
    if (items[i]->ticket || !items[i]->work.known) continue;
    if (overlap(read_by(items[i], 0), unknown) || overlap(read_by(items[i], 1), unknown)) items[i]->work.known = 0;
  }
}

static void compute(const local_work *w) {
  const int64_t *a = w->from[0], *b = w->from[1];
  int64_t *to = w->to;
  size_t numbers = w->from_size[0] / sizeof *a;
  if (w->kind == WORK_COPY) {
    memmove(w->to, w->from[0], w->from_size[0]);
  } else if (w->kind == WORK_SUM || w->kind == WORK_MAX) {
    int64_t all = numbers ? a[0] : 0;
    for (size_t i = 1; i < numbers; i++) all = w->kind == WORK_SUM ? all + a[i] : a[i] > all ? a[i] : all;
    *to = all;
  } else {
    for (size_t i = 0; i < numbers; i++) {
      if (w->kind == WORK_ADD) to[i] = a[i] + w->factor * b[i];
      else if (w->kind == WORK_ADD_CONSTANT) to[i] = a[i] + w->constant;
      else ((char *)w->to)[i] = a[i] > b[i];
    }
  }
}

/* Every rank adds in the order of the ranks, so that all have the same bits. */
static int reduce(const receipt *r) {
  size_t said = r->own_size;
  char *sum = malloc(r->part), *part = malloc(said);
  int known = 1, ranks = r->when.at->ranks;
  for (int q = 0; q < ranks && known; q++) {
    int own = q == r->rank;
    if (own) memcpy(part, r->own, said);
    else known = vgpu_hear(&r->when, r->rank, q, part, said) == said;
    if (known) known = vgpu_reduce(sum, part + r->offset, r->part, r->type, r->operation, !q);
  }
  if (known) known = vgpu_finish_reduction(sum, r->part, r->type, r->operation, ranks);
  if (known) memcpy(r->to, sum, r->part);
  free(sum);
  free(part);
  return known;
}

static int receive(const receipt *r) {
  int known = 1;
  char *said = malloc(r->offset + r->part);
  for (int q = 0; q < r->when.at->ranks; q++) {
    size_t size = 0;
    if (r->from >> q & 1) {
      size = vgpu_hear(&r->when, r->rank, q, said, r->offset + r->part);
    } else if (r->takes_own && q == r->rank) {
      size = r->own_size < r->offset + r->part ? r->own_size : r->offset + r->part;
      memcpy(said, r->own, size);
    } else {
      continue;
    }
    if (size > r->offset) memcpy((char *)r->to + (r->is_spread ? q * r->part : 0), said + r->offset, size - r->offset);
    else known = 0;
  }
  free(said);
  return known;
}

/* What ranks said that nobody here can use is removed all the same. */
static void discard(const receipt *r) {
  for (int q = 0; q < r->when.at->ranks && r->part <= MESSAGE_MAX; q++) {
    if (r->from >> q & 1) vgpu_hear(&r->when, r->rank, q, 0, 0);
  }
}

static void finish(item *i, int at) {
  const receipt *r = &i->receipt;
  int known = i->ticket ? r->to && (r->is_reduction ? reduce(r) : receive(r)) : i->work.known;
  if (!i->ticket) compute(&i->work);
  else if (!known) discard(r);
  if (!known) spoil(written_by(i), at + 1);
}

static int is_ready(const item *i) {
  return !i->ticket || vgpu_said(&i->receipt.when, i->receipt.rank, i->receipt.from);
}

/* Does whatever can be done, in order; the first wanted item that must still wait is copied out. With the lock held. */
static int advance(receipt *awaited) {
  int left = 0, found = 0;
  for (int at = 0; at < count; at++) {
    item *i = items[at];
    if (is_ready(i) && !follows_any(i, left)) {
      finish(i, at);
      free((void *)i->receipt.own);
      free(i);
      continue;
    }
    if (i->wanted && i->ticket && !found++) *awaited = i->receipt;
    items[left++] = i;
  }
  __atomic_store_n(&count, left, __ATOMIC_RELEASE);
  return found;
}

/* ---- waiting */

static long long nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ll + now.tv_nsec;
}

static int waiting(void) { return __atomic_load_n(&count, __ATOMIC_ACQUIRE); }

static void want_what_they_follow(void) {
  for (int later = count - 1; later > 0; later--) {
    if (!items[later]->wanted) continue;
    for (int i = 0; i < later; i++) items[i]->wanted |= must_follow(items[later], items[i]);
  }
}

/* Waits until nothing in the range and no collective up to the tickets is left. */
static void wait_for(const u64 *needs, span range) {
  long long since = nanoseconds(), looked = since, nap = 20000;
  occasion before = {0};
  while (waiting()) {
    receipt awaited;
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < count; i++) {
      items[i]->wanted = overlap(written_by(items[i]), range) || overlap(read_by(items[i], 0), range) ||
                         overlap(read_by(items[i], 1), range) ||
                         (needs && items[i]->ticket && items[i]->ticket <= needs[items[i]->lane]);
    }
    want_what_they_follow();
    int found = advance(&awaited);
    pthread_mutex_unlock(&mutex);
    if (!found) return;
    long long now = nanoseconds();
    if (memcmp(&awaited.when, &before, sizeof before)) {
      before = awaited.when; /* one came: whoever is next has all the time again */
      since = looked = now;
      nap = 20000;
    }
    if (now - looked > LOOK_FOR_MISSING) {
      vgpu_look_for_missing(&awaited.when, awaited.rank, awaited.from, now - since);
      looked = now;
    }
    nanosleep(&(struct timespec){0, nap}, 0);
    if (nap < 1000000) nap += nap / 4;
  }
}

void vgpu_wait_for_lanes(const u64 needs[LANES]) {
  u64 until[LANES];
  if (!waiting()) return;
  for (int i = 0; i < LANES; i++) until[i] = __atomic_load_n(&needs[i], __ATOMIC_RELAXED);
  wait_for(until, spans(0, 0));
}

int vgpu_awaited(const void *start, size_t size) {
  int found = 0;
  if (!waiting()) return 0;
  pthread_mutex_lock(&mutex);
  for (int i = 0; i < count && !found; i++) {
    span range = spans(start, size);
    found = overlap(written_by(items[i]), range) || overlap(read_by(items[i], 0), range) ||
            overlap(read_by(items[i], 1), range);
  }
  pthread_mutex_unlock(&mutex);
  return found;
}

void vgpu_wait_for_range(const void *start, size_t size) {
  if (size && vgpu_awaited(start, size)) wait_for(0, spans(start, size));
}

void vgpu_wait_for_all(void) {
  u64 all[LANES];
  for (int i = 0; i < LANES; i++) all[i] = UINT64_MAX;
  wait_for(all, (span){0, UINTPTR_MAX});
}

/* ---- queueing */

static void append(item *added) {
  if (count == capacity) {
    capacity = capacity ? capacity * 2 : 64;
    items = realloc(items, capacity * sizeof *items);
  }
  items[count] = added;
  __atomic_store_n(&count, count + 1, __ATOMIC_RELEASE);
}

void vgpu_work(const local_work *work) {
  item *added = calloc(1, sizeof *added);
  added->work = *work;
  if (work->known) vgpu_note_message(work->to, work->to_size);
  else vgpu_forget_upload(work->to, work->to_size);
  pthread_mutex_lock(&mutex);
  if (follows_any(added, count)) {
    append(added);
  } else {
    compute(work);
    free(added);
  }
  pthread_mutex_unlock(&mutex);
}

void vgpu_await(const receipt *r, stream *queue) {
  item *added = calloc(1, sizeof *added);
  added->receipt = *r;
  added->receipt.own = 0;
  if (r->own_size) added->receipt.own = memcpy(malloc(r->own_size), r->own, r->own_size);
  added->lane = (int)(r->when.serial % LANES);
  receipt ignored;
  u64 oldest[LANES] = {0};
  pthread_mutex_lock(&mutex);
  added->ticket = ++tickets;
  append(added);
  __atomic_store_n(&queue->needs[added->lane], added->ticket, __ATOMIC_RELAXED);
  for (int i = 0; i < count; i++) items[i]->wanted = 0;
  if (count % LOOK_AFTER == 0) advance(&ignored);
  int full = count > FULL;
  for (int i = 0; i < LANES && full; i++) oldest[i] = added->ticket - FULL;
  pthread_mutex_unlock(&mutex);
  if (full) vgpu_wait_for_lanes(oldest);
}
