/* Loop over elements: `element` is generated for the operation and its types FROM and TO. */
extern "C" __global__ void ucch(const FROM *src, TO *dst, unsigned long long n, double by) {
    unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)
        element(dst[i], src[i], by);
}
