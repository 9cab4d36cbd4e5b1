/* The kernel that copies and converts pieces of pages, element by element. Included by fakegpu.c. */
#include "../../ucc_hetero/device/kernels/arith.h"

/* UCC's numbers of these types, and the engine's of float8. */
enum { FLOAT16 = 80, FLOAT32 = 88, BFLOAT16 = 104, E4M3FN = 256, E4M3FNUZ = 264 };

static float read_float(int type, const void *src) {
    uint16_t half;
    float whole;
    memcpy(&half, src, 2);
    if (type != FLOAT32) return type == FLOAT16 ? from_half(half) : from_bhalf(half);
    memcpy(&whole, src, 4);
    return whole;
}

static void write_float(int type, void *dst, float f) {
    uint16_t half = type == FLOAT16 ? to_half(f) : to_bhalf(f);
    memcpy(dst, type == FLOAT32 ? (void *)&f : &half, type == FLOAT32 ? 4 : 2);
}

static void convert_element(const ucch_rows *r, const char *src, char *dst) {
    if (r->from == r->to)
        memcpy(dst, src, r->to_bytes);
    else if (r->from == E4M3FN)
        *dst = (char)e4m3fn_to_fnuz((unsigned char)*src);
    else if (r->from == E4M3FNUZ)
        *dst = (char)e4m3fnuz_to_fn((unsigned char)*src);
    else
        write_float(r->to, dst, read_float(r->from, src));
}

static void run_pieces(queue *s, ucch_pieces *all) {
    const ucch_rows *r = &all->rows;
    touch(all->each);
    take_time(s);
    for (uint64_t i = 0; i < all->n; i++) {
        const ucch_piece *p = &all->each[i];
        if (!p->count) continue;
        touch(p->src), touch(p->dst);
        if ((uintptr_t)p->src % r->from_bytes || (uintptr_t)p->dst % r->to_bytes || p->count > all->most) {
            fputs("fakegpu: a kernel at an address that is no element's\n", stderr);
            abort();
        }
        if (live(p->src) + live(p->dst) < 2) continue;
        if (!r->row) memcpy(p->dst, p->src + p->first, p->count);
        for (uint64_t k = 0; r->row && k < p->count; k++) {
            uint64_t at = p->first + k, row = at / r->row;
            uint64_t place = row / r->rows * r->groups_apart + row % r->rows * r->apart + at % r->row;
            convert_element(r, p->src + place * r->from_bytes, p->dst + k * r->to_bytes);
        }
    }
    free(all);
}
