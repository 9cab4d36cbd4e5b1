/* Wait for a word; and write another before that, if there is one, with the upper half of `n`. */
#include "words.cuh"

extern "C" __global__ void ucch(unsigned *src, unsigned *dst, unsigned long long n, double) {
    if (src) POST(src, n >> 32);
    AWAIT(dst, n);
}
