/* Pieces of pages (cffi_build/rma/staged.c): each is copied unchanged, or gathered from rows and converted by
 * `element`, which is generated for the types FROM and TO. A block processes slices of pieces. */
#include "copies.cuh"
#include "layout.h"

extern "C" __global__ void ucch(ucch_pieces all) {
    const ucch_rows r = all.rows;
    const unsigned row = (unsigned)r.row, rows = (unsigned)r.rows;
    __shared__ ucch_piece p;
    const unsigned slice = row ? UCCH_PIECE_SLICE : UCCH_PLAIN_SLICE;
    const unsigned long long slices = (all.most + slice - 1) / slice;
    for (unsigned long long s = blockIdx.x; s < all.n * slices; s += gridDim.x) {
        __syncthreads();
        if (threadIdx.x == 0) p = all.each[s / slices]; /* in host memory */
        __syncthreads();
        const unsigned long long from = s % slices * slice, left = p.count < from ? 0 : p.count - from;
        const unsigned some = left < slice ? (unsigned)left : slice;
        if (!row) copy_quads<4>(p.dst + from, p.src + p.first + from, some);
        for (unsigned i = threadIdx.x; row && i < some; i += blockDim.x) {
            const unsigned at = (unsigned)(p.first + from) + i, k = at / row;
            const FROM *src = (const FROM *)p.src + k / rows * r.groups_apart + k % rows * r.apart + at % row;
            element(((TO *)p.dst)[from + i], *src, 0);
        }
    }
}
