// Reads the CUDA (or ROCm) caching allocator without building a dict, for native.py. Needs torch 2.9 or newer, for
// c10::getDeviceAllocator; no CUDA headers. The caller holds the GIL.
#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <cstdint>

enum { RESET = 1, CHECK = 2 };                            // what to do after reading
// Not every torch counts private pools apart.
template <typename Stats>
static bool has_private_pools(const Stats& stats) {
  if constexpr (requires { stats.reserved_bytes_by_private_pools; })
    return !stats.reserved_bytes_by_private_pools.empty();
  else
    return false;
}

enum { FAILED = -1, READ = 0, DISTURBED = 1, POOLS = 2 };  // what is returned

// figures: 10 numbers, the first fields of gpumon_agent.allocator.Reading, in bytes or counts, in its order.
// peaks: 29 numbers, raised to the counters' peaks; the order of peaks.py's `_counters`.
//
// RESET: resets the peak counters. CHECK: DISTURBED if another thread has allocated between reading and reset.
// POOLS: private memory pools exist, whose peaks have no place in `peaks`. Nothing was changed then.
extern "C" int gpumon_boundary(int device, int64_t* figures, int64_t* peaks, int what) {
  try {
    const auto index = static_cast<c10::DeviceIndex>(device);
    auto* allocator = c10::getDeviceAllocator(c10::DeviceType::CUDA);
    const auto stats = allocator->getDeviceStats(index);
    if (has_private_pools(stats)) return POOLS;

    const decltype(stats.allocation)* counters[] = {
        &stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.inactive_split_bytes,
        &stats.requested_bytes, &stats.allocation,     &stats.segment,      &stats.active,
        &stats.inactive_split};
    for (const auto* counter : counters)
      for (const auto& pool : *counter) {  // all, small, large
        *peaks = std::max(*peaks, pool.peak);
        ++peaks;
      }
    peaks[0] = std::max(peaks[0], stats.oversize_allocations.peak);
    peaks[1] = std::max(peaks[1], stats.oversize_segments.peak);

    const int64_t read[] = {
        stats.allocated_bytes[0].current, stats.allocated_bytes[0].peak, stats.reserved_bytes[0].current,
        stats.reserved_bytes[0].peak,     stats.active_bytes[0].current, stats.inactive_split_bytes[0].current,
        stats.requested_bytes[0].current, stats.allocation[0].current,   stats.num_alloc_retries,
        stats.num_ooms};
    std::copy(std::begin(read), std::end(read), figures);

    if (what & RESET) allocator->resetPeakStats(index);
    if (what & CHECK && allocator->getDeviceStats(index).allocation[0].allocated != stats.allocation[0].allocated)
      return DISTURBED;
    return READ;
  } catch (...) {  // an allocator without statistics, an unknown device: torch's own reader says which
    return FAILED;
  }
}
