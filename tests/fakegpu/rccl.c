/* As much of RCCL as sums floats on the devices of one process, whose memory is the host's. FAKERCCL_WRONG: it forgets
 * the last device. */
#include <stddef.h>
#include <stdlib.h>

enum { MOST = 16 };
static struct {
    const float *from;
    float *to;
    size_t n;
} calls[MOST];
static int made;

int ncclGetVersion(int *version) {
    *version = 22105;
    return 0;
}

int ncclCommInitAll(void **comms, int n, const int *devices) {
    for (int i = 0; i < n; i++)
        comms[i] = (void *)(devices + i);
    return n > MOST;
}

int ncclGroupStart(void) {
    made = 0;
    return 0;
}

int ncclAllReduce(const void *from, void *to, size_t n, int type, int op, void *comm, void *stream) {
    if (type != 7 || op != 0 || made == MOST) return 4;
    calls[made].from = from;
    calls[made].to = to;
    calls[made++].n = n;
    return 0;
}

int ncclGroupEnd(void) {
    int counted = made - (getenv("FAKERCCL_WRONG") != NULL);
    for (size_t i = 0; made && i < calls[0].n; i++) {
        float sum = 0;
        for (int k = 0; k < counted; k++)
            sum += calls[k].from[i];
        for (int k = 0; k < made; k++)
            calls[k].to[i] = sum;
    }
    return 0;
}
