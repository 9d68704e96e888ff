/* A libamd_smi.so for tests: AMD's Python module is the real one, and its structures are in layouts.h, made from it.
 *
 * AMD_STAND_IN says what it does: "devices=2" how many there are (1); "FUNCTION=2" that amdsmi_FUNCTION returns this
 * status, with "from=2" or "until=1" only in the readings from the second on, or in the first; "serial=…" as below, and
 * others by which a figure is set. The test compiles it with every other function that the module looks up; those
 * answer "not supported".
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "layouts.h"

enum { OK = 0, NOT_INIT = 32 };
static int started, readings;

static long said(const char *word, long otherwise) {
    const char *all = getenv("AMD_STAND_IN");
    char key[128];
    snprintf(key, sizeof key, "%s=", word);
    const char *at = all == NULL ? NULL : strstr(all, key);
    return at == NULL ? otherwise : strtol(at + strlen(key), NULL, 10);
}

/* Handles are index + 1: NULL is none. */
static long index_of(const void *handle) { return (long)(intptr_t)handle - 1; }

static int fails(const char *function) {
    return readings < said("from", 0) || readings > said("until", 9) ? OK : said(function, OK);
}

#define BEGIN(name)                             \
    if (fails(#name) != OK) return fails(#name); \
    if (!started) return NOT_INIT

int amdsmi_init(uint64_t flags) {
    printf("the library prints\n");
    fflush(stdout);
    if (flags != 2 || said("init", OK) != OK) return flags == 2 ? said("init", OK) : 1;
    started = 1;
    return OK;
}

static int list(uint32_t *count, void **handles, long first, long number) {
    if (handles != NULL)
        for (long i = 0; i < number; i++) handles[i] = (void *)(intptr_t)(first + i + 1);
    *count = number;
    return OK;
}

int amdsmi_get_socket_handles(uint32_t *count, void **sockets) {
    BEGIN(get_socket_handles);
    readings += sockets == NULL;
    return list(count, sockets, 0, said("devices", 1));
}

int amdsmi_get_processor_handles(void *socket, uint32_t *count, void **processors) {
    BEGIN(get_processor_handles);
    return list(count, processors, index_of(socket), 1);
}

int amdsmi_get_gpu_device_bdf(void *handle, uint64_t *bdf) {
    BEGIN(get_gpu_device_bdf);
    *bdf = (uint64_t)(index_of(handle) + 3) << 8; /* 0000:03:00.0 */
    return OK;
}

/* The unique_id of the MI300X whose UUID in torch is in ROCm's issue 4203; the next device has the next one. With
 * "serial=0" no device has one, "serial=1": all have the same; "serial=2": by the socket's, as asic_info tells it in
 * newer libraries; "serial=3": what stands for none; "serial=4": 0. */
static void serial(char *text, size_t size, const char *form, long index, int of_socket) {
    long how = said("serial", 5);
    unsigned long long id = 0xf330dc4d00dee22bULL + (how == 1 || (how == 2 && of_socket) ? 0 : index);
    if (how != 0) snprintf(text, size, form, how == 3 ? ~0ULL : how == 4 ? 0 : id);
}

int amdsmi_get_gpu_asic_info(void *handle, amdsmi_asic_info_t *info) {
    BEGIN(get_gpu_asic_info);
    memset(info, 0, sizeof *info);
    strcpy(info->market_name, "AMD Instinct MI300X");
    serial(info->asic_serial, sizeof info->asic_serial, "%llx", index_of(handle), 1);
    return OK;
}

#ifdef HAS_amdsmi_enumeration_info_t
int amdsmi_get_gpu_enumeration_info(void *handle, amdsmi_enumeration_info_t *info) {
    BEGIN(get_gpu_enumeration_info);
    memset(info, 0, sizeof *info);
    serial(info->hip_uuid, sizeof info->hip_uuid, "GPU-%016llx", index_of(handle), 0);
    return OK;
}
#endif

#ifdef HAS_amdsmi_kfd_info_t
int amdsmi_get_gpu_kfd_info(void *handle, amdsmi_kfd_info_t *info) {
    BEGIN(get_gpu_kfd_info);
    memset(info, 0, sizeof *info);
    info->kfd_id = 28851 + index_of(handle);
    return OK;
}
#endif

int amdsmi_get_gpu_driver_info(void *handle, amdsmi_driver_info_t *info) {
    BEGIN(get_gpu_driver_info);
    memset(info, 0, sizeof *info);
    strcpy(info->driver_name, "amdgpu");
    strcpy(info->driver_version, said("unversioned", 0) ? "" : "6.10.5");
    return OK;
}

int amdsmi_get_gpu_memory_total(void *handle, int kind, uint64_t *bytes) {
    BEGIN(get_gpu_memory_total);
    *bytes = kind == 0 ? said("total", 206141652992) : 1; /* 0: VRAM */
    return OK;
}

int amdsmi_get_gpu_memory_usage(void *handle, int kind, uint64_t *bytes) {
    BEGIN(get_gpu_memory_usage);
    *bytes = kind == 0 ? said("used", 5368713217) + index_of(handle) : 1;
    return OK;
}

int amdsmi_get_gpu_process_list(void *handle, uint32_t *count, amdsmi_proc_info_t *processes) {
    BEGIN(get_gpu_process_list);
    pid_t pids[2] = {getpid(), getppid()};
    for (uint32_t i = 0; i < 2 && i < *count; i++) {
        memset(&processes[i], 0, sizeof processes[i]);
        strcpy(processes[i].name, "/usr/bin/stand-in");
        processes[i].pid = pids[i];
        processes[i].mem = processes[i].memory_usage.vram_mem = 999; /* of file descriptors: not to be used */
    }
    *count = 2;
    return OK;
}

int amdsmi_get_gpu_activity(void *handle, amdsmi_engine_usage_t *usage) {
    BEGIN(get_gpu_activity);
    memset(usage, 0, sizeof *usage);
    usage->gfx_activity = said("activity", 87);
    usage->umc_activity = 12;
    return OK;
}

int amdsmi_get_temp_metric(void *handle, int sensor, int metric, int64_t *degrees) {
    BEGIN(get_temp_metric);
    *degrees = sensor == 1 && metric == 0 ? said("degrees", 54) : 1; /* junction, current */
    return OK;
}

int amdsmi_get_power_info(void *handle, amdsmi_power_info_t *power) {
    BEGIN(get_power_info);
    memset(power, 0xff, sizeof *power);
    power->average_socket_power = said("average", 0xffff);
    power->current_socket_power = said("current", 0xffff);
    return OK;
}

/* What amdsmi 6.4 calls. */
int amdsmi_get_power_info_v2(void *handle, uint32_t sensor, amdsmi_power_info_t *power) {
    return sensor == 0 ? amdsmi_get_power_info(handle, power) : 1;
}

int amdsmi_get_power_cap_info(void *handle, uint32_t sensor, amdsmi_power_cap_info_t *cap) {
    BEGIN(get_power_cap_info);
    memset(cap, 0, sizeof *cap);
    cap->power_cap = said("cap", 750000000);
    return OK;
}
