// The best rows of each query by their scores: of equal scores the earlier rows, places in rising order.
//
// A cluster of blocks serves one query, each block a stretch of its scores. The bits of the last score that has a place
// are found digit by digit from histograms in shared memory, which the blocks of a cluster sum by reading each other's;
// what lies above that threshold in the stretches before says where a block begins to write. Digits that decide early
// spare the rest of the passes.

#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kBins = 2048;
constexpr int kDigits = 3;
constexpr int kReads = 4;  // independent loads of a thread
__device__ constexpr int kLow[kDigits] = {21, 10, 0};
__device__ constexpr int kSize[kDigits] = {11, 11, 10};

struct Shared {
  int histogram[kDigits][kBins];
  int counts[kReads][2][kWarps];
  int warp_sums[kWarps];
  int digit, room;
  int above, equal;  // of this block's stretch
};

__device__ uint32_t block_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ uint32_t num_blocks() {
  uint32_t count;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
  return count;
}

__device__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// A value of the shared memory of block `rank` of the cluster, at the same place as `own` here.
__device__ int of_block(const int* own, uint32_t rank) {
  uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(own));
  uint32_t there;
  int value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(value) : "r"(there) : "memory");
  return value;
}

// Bits that compare as unsigned numbers as the scores do; both zeros are one.
__device__ uint32_t ordered(float score) {
  uint32_t bits = score == 0.0f ? 0u : __float_as_uint(score);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ int warp_sum(int value) {
  for (int offset = 16; offset; offset >>= 1) value += __shfl_xor_sync(~0u, value, offset);
  return value;
}

// Sum over the block, in all threads.
__device__ int block_sum(int value, Shared& shared) {
  value = warp_sum(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared.warp_sums[threadIdx.x / 32] = value;
  __syncthreads();
  return warp_sum(shared.warp_sums[threadIdx.x % 32]);
}

// Of the cluster's histogram: the digit of the last score that has one of `room` places, and the places left in it.
__device__ void find_digit(Shared& shared, int pass, int room, uint32_t blocks) {
  // Thread t owns the t-th pair of bins from the top.
  const int high = kBins - 1 - 2 * threadIdx.x;
  int upper = 0, lower = 0;
  for (uint32_t rank = 0; rank < blocks; ++rank) {
    upper += of_block(&shared.histogram[pass][high], rank);
    lower += of_block(&shared.histogram[pass][high - 1], rank);
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = upper + lower;
  for (int offset = 1; offset < 32; offset <<= 1) {
    int other = __shfl_up_sync(~0u, sum, offset);
    if (lane >= offset) sum += other;
  }
  if (lane == 31) shared.warp_sums[warp] = sum;
  __syncthreads();
  int before = lane < warp ? shared.warp_sums[lane] : 0;
  before = warp_sum(before) + sum - upper - lower;
  if (before < room && room <= before + upper) {
    shared.digit = high;
    shared.room = room - before;
  } else if (before + upper < room && room <= before + upper + lower) {
    shared.digit = high - 1;
    shared.room = room - before - upper;
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads, 2)
    choose(const float* scores, int* slots, const int* visible, const int* first_pages, const int* indices,
           long long width, int top_k, int block_size) {
  __shared__ Shared shared;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const uint32_t blocks = num_blocks(), rank = block_rank();
  const long long query = blockIdx.x / blocks;
  const int count = visible[query];
  const int* pages = indices + first_pages[query];
  const float* at = scores + query * width;
  int* target = slots + query * top_k;
  const int step = kThreads * kReads;
  const int stretch = (count + blocks * step - 1) / (blocks * step) * step;
  const int begin = min(count, static_cast<int>(rank) * stretch), end = min(count, begin + stretch);

  if (count <= top_k) {  // the same for all blocks of the cluster
    for (int row = begin + thread; row < end; row += kThreads)
      target[row] = pages[row / block_size] * block_size + row % block_size;
    return;
  }

  for (int bin = thread; bin < kDigits * kBins; bin += kThreads) (&shared.histogram[0][0])[bin] = 0;
  __syncthreads();
  uint32_t threshold = 0;
  int room = top_k, above = 0, equal = 0;
  for (int pass = 0; pass < kDigits; ++pass) {
    const int low = kLow[pass], high = low + kSize[pass];
    int* histogram = shared.histogram[pass];
    for (int first = begin; first < end; first += step) {
      float values[kReads];
#pragma unroll
      for (int i = 0; i < kReads; ++i) {
        int row = first + i * kThreads + thread;
        values[i] = row < end ? at[row] : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kReads; ++i) {
        uint32_t key = ordered(values[i]);
        bool same = pass == 0 || (key >> high) == (threshold >> high);
        if (same && first + i * kThreads + thread < end) atomicAdd(&histogram[(key >> low) & ((1 << kSize[pass]) - 1)], 1);
      }
    }
    cluster_sync();
    find_digit(shared, pass, room, blocks);
    const int digit = shared.digit;
    room = shared.room;
    threshold |= static_cast<uint32_t>(digit) << low;
    int more = 0;
    for (int bin = thread; bin < kBins; bin += kThreads) more += bin > digit ? histogram[bin] : 0;
    above += block_sum(more, shared);
    equal = histogram[digit];
    int all = 0;
    for (uint32_t other = 0; other < blocks; ++other) all += of_block(&histogram[digit], other);
    // Whatever begins so has a place: the rest of the digits does not matter, and lowest ones take all.
    if (all == room) break;
  }
  if (thread == 0) {
    shared.above = above;
    shared.equal = equal;
  }
  // Also orders the threshold's digits, read above, before what follows.
  cluster_sync();
  int taken = 0, equals = 0, total_equal = 0;
  for (uint32_t other = 0; other < blocks; ++other) {
    int their_equal = of_block(&shared.equal, other);
    total_equal += their_equal;
    if (other < rank) {
      taken += of_block(&shared.above, other);
      equals += their_equal;
    }
  }
  cluster_sync();  // nobody leaves while others read its memory
  const bool takes_all = total_equal == room;
  taken += min(equals, room);

  for (int first = begin; first < end; first += step) {
    uint32_t more[kReads], same[kReads];
    bool is_above[kReads], is_equal[kReads];
    float values[kReads];
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      int row = first + i * kThreads + thread;
      values[i] = row < end ? at[row] : 0.0f;
    }
    bool any = false;
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      uint32_t key = ordered(values[i]);
      bool there = first + i * kThreads + thread < end;
      is_above[i] = there && (takes_all ? key >= threshold : key > threshold);
      is_equal[i] = there && !takes_all && key == threshold;
      more[i] = __ballot_sync(~0u, is_above[i]);
      same[i] = __ballot_sync(~0u, is_equal[i]);
      any |= (more[i] | same[i]) != 0;
      if (lane == 0) {
        shared.counts[i][0][warp] = __popc(more[i]);
        shared.counts[i][1][warp] = __popc(same[i]);
      }
    }
    if (!__syncthreads_or(any)) continue;
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      // Every warp sums up what the warps before it have found in this span of rows.
      int their_more = shared.counts[i][0][lane], their_same = shared.counts[i][1][lane];
      int more_before = warp_sum(lane < warp ? their_more : 0), same_before = warp_sum(lane < warp ? their_same : 0);
      int all_more = warp_sum(their_more), all_same = warp_sum(their_same);
      uint32_t lower = (1u << lane) - 1;
      int my_more = more_before + __popc(more[i] & lower), my_same = same_before + __popc(same[i] & lower);
      int equals_here = equals + my_same;
      if (is_above[i] || (is_equal[i] && equals_here < room)) {
        int place = taken + my_more + min(room, equals_here) - min(room, equals);
        int row = first + i * kThreads + thread;
        target[place] = pages[row / block_size] * block_size + row % block_size;
      }
      taken += all_more + min(room, equals + all_same) - min(room, equals);
      equals += all_same;
    }
    __syncthreads();
  }
}

}  // namespace

// Starts the choice on a stream; blocks of one query: 1, 2, 4 or 8. Returns a cudaError_t.
extern "C" int choose_rows(const float* scores, int* slots, const int* visible, const int* first_pages,
                           const int* indices, long long num_queries, long long width, int top_k, int block_size,
                           int blocks, void* stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(num_queries * blocks));
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = blocks;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, choose, scores, slots, visible, first_pages, indices, width, top_k, block_size);
}
