/* Pieces of pages (cffi_build/rma/pieces.c): each is gathered from rows and converted by `element`, which is written
 * for the types FROM and TO. A block has slices of pieces. */
#include "layout.h"

extern "C" __global__ void ucch(ucch_pieces all) {
    const ucch_rows r = all.rows;
    const unsigned row = (unsigned)r.row, rows = (unsigned)r.rows;
    const unsigned long long slices = (all.most + UCCH_PIECE_SLICE - 1) / UCCH_PIECE_SLICE;
    for (unsigned long long s = blockIdx.x; s < all.n * slices; s += gridDim.x) {
        const ucch_piece p = all.each[s / slices];
        const unsigned long long from = s % slices * UCCH_PIECE_SLICE, left = p.count < from ? 0 : p.count - from;
        const unsigned some = left < UCCH_PIECE_SLICE ? (unsigned)left : UCCH_PIECE_SLICE;
        for (unsigned i = threadIdx.x; i < some; i += blockDim.x) {
            const unsigned at = (unsigned)(p.first + from) + i, k = at / row;
            const FROM *src = (const FROM *)p.src + k / rows * r.groups_apart + k % rows * r.apart + at % row;
            element(((TO *)p.dst)[from + i], *src, 0);
        }
    }
}
