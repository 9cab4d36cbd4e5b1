/* Write a word, with the upper half of `n`, and then wait for another: where there is the one, and the other. */
#include "words.cuh"

extern "C" __global__ void ucch(unsigned *src, unsigned *dst, unsigned long long n, double) {
    if (src) POST(src, n >> 32);
    if (dst) AWAIT(dst, n);
}
