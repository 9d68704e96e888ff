/* What a session's devices gave at most, and which rank was missed: read by Python through this library, also when every process has ended. */
#include <sys/mman.h>

#include "nvml.h"

/* record: capacity, used, contexts, refusals, refused_bytes of a device. 0 where there is no such table or device. */
API int vgpu_read_record(const char *session, int device, uint64_t record[5]) {
  shared_table *table = table_open(session, 0);
  if (!table) return 0;
  table_lock(table);
  int known = device >= 0 && device < table->devices;
  if (known) {
    const device_record *kept = &table->record[device];
    record[0] = table->device[device].total;
    record[1] = kept->used;
    record[2] = kept->contexts;
    record[3] = kept->refusals;
    record[4] = kept->refused_bytes;
  }
  table_unlock(table);
  munmap(table, sizeof *table);
  return known;
}

/* absence: the rank, whether it had ended, and else how many seconds it was waited for. 0 where every rank came. */
API int vgpu_read_absence(const char *session, int absence[3]) {
  shared_table *table = table_open(session, 0);
  if (!table) return 0;
  table_lock(table);
  int happened = table->absence.happened;
  absence[0] = table->absence.rank;
  absence[1] = table->absence.ended;
  absence[2] = table->absence.seconds;
  table_unlock(table);
  munmap(table, sizeof *table);
  return happened;
}
