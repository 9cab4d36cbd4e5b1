/* The part of HIP's device headers that our kernels use, as ROCm 6 defines it (amd_hip_runtime.h,
 * amd_device_functions.h, amd_hip_atomic.h), so that clang compiles them without ROCm. */
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))

struct ucch_thread_x {
    __device__ operator unsigned() const { return __builtin_amdgcn_workitem_id_x(); }
};
struct ucch_block_x {
    __device__ operator unsigned() const { return __builtin_amdgcn_workgroup_id_x(); }
};
struct ucch_threads_x {
    __device__ operator unsigned() const { return __builtin_amdgcn_workgroup_size_x(); }
};
struct ucch_blocks_x {
    __device__ operator unsigned() const {
        return __builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x();
    }
};
static __device__ struct {
    ucch_thread_x x;
} threadIdx;
static __device__ struct {
    ucch_block_x x;
} blockIdx;
static __device__ struct {
    ucch_threads_x x;
} blockDim;
static __device__ struct {
    ucch_blocks_x x;
} gridDim;

static __device__ void __syncthreads() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
static __device__ void __threadfence_system() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, ""); }
static __device__ unsigned atomicExch(unsigned *at, unsigned value) {
    return __atomic_exchange_n(at, value, __ATOMIC_RELAXED);
}
static __device__ unsigned atomicInc(unsigned *at, unsigned most) {
    return __builtin_amdgcn_atomic_inc32(at, most, __ATOMIC_RELAXED, "agent");
}
static __device__ float __uint_as_float(unsigned u) { return __builtin_bit_cast(float, u); }
static __device__ unsigned __float_as_uint(float f) { return __builtin_bit_cast(unsigned, f); }
static __device__ float rintf(float x) { return __builtin_rintf(x); }
