/* The run-time compiler of either vendor: it knows how to add floats, to wait for a word and to write one, and how to
 * do all of a short call, one side of a message, pieces of pages, or messages that wires carry; everything else is too
 * hard for it. Included by fakegpu.c. */
static const char ADDS[] = "adds floats", AWAITS[] = "awaits a word", POSTS[] = "posts a word",
                  FUSED_TEXT[] = "does it all", LANES[] = "moves a message", PIECES_TEXT[] = "converts pieces",
                  RINGS[] = "moves through rings";

static int movers; /* kernels of several blocks that have moved messages */

static const char *made_of(const char *source) {
    int adds = strstr(source, "UCCH_SUM(a, b));") != NULL;
    if (strstr(source, "ucch(ucch_moves all)"))
        return adds && (strstr(source, "float FROM;") || strstr(source, "unsigned char FROM;")) ? FUSED_TEXT : NULL;
    if (adds && strstr(source, "float FROM;")) return ADDS;
    if (strstr(source, "ucch(ucch_lane_copy c)")) return LANES;
    if (strstr(source, "ucch(ucch_pieces all)")) return PIECES_TEXT;
    if (strstr(source, "ucch(ucch_ring_copies all)")) return RINGS;
    return strstr(source, "AWAIT(dst, n)") ? AWAITS : strstr(source, "POST(dst, n)") ? POSTS : NULL;
}

/* The one argument of a kernel that takes a structure of so many bytes, with room for more. */
static void *argument(void **arguments, size_t room, size_t bytes) {
    void *copy = malloc(room);
    return copy ? memcpy(copy, arguments[0], bytes) : NULL;
}

/* A kernel, and the image that it is read from. */
typedef struct function {
    const char *kernel, *image;
    int loaded;
} function;

static int launch_kernel(void *handle_of_function, unsigned blocks, unsigned threads, void **arguments, void *handle) {
    function *f = handle_of_function;
    if (usable()) return usable();
    if (strcmp(f->kernel, f->image)) return INVALID_VALUE; /* the image is gone, which was not copied */
    first_launch(&f->loaded);
    const char *function = f->kernel;
    if (function == FUSED_TEXT) {
        moves *all = argument(arguments, sizeof(*all), offsetof(moves, blocks));
        if (all) all->blocks = blocks;
        return all ? submit(handle, (work){.kind = FUSED, .dst = all}) : OUT_OF_MEMORY;
    }
    if (function == LANES) {
        __atomic_add_fetch(&movers, blocks > 1, __ATOMIC_RELAXED);
        ucch_lane_copy *c = argument(arguments, sizeof(*c), sizeof(*c));
        return c ? submit(handle, (work){.kind = LANE, .dst = c}) : OUT_OF_MEMORY;
    }
    if (function == PIECES_TEXT) {
        ucch_pieces *all = argument(arguments, sizeof(*all), sizeof(*all));
        return all ? submit(handle, (work){.kind = PIECES, .dst = all}) : OUT_OF_MEMORY;
    }
    if (function == RINGS) {
        ucch_ring_copies *all = argument(arguments, sizeof(*all), sizeof(*all));
        if (all && blocks != 2 * all->width) return INVALID_VALUE;
        __atomic_add_fetch(&movers, 1, __ATOMIC_RELAXED);
        return all ? submit(handle, (work){.kind = RING, .dst = all}) : OUT_OF_MEMORY;
    }
    const void *src = *(void **)arguments[0];
    void *dst = *(void **)arguments[1];
    uint64_t n = *(uint64_t *)arguments[2];
    if (function == ADDS) {
        touch(src), touch(dst);
        return submit(handle, (work){.kind = ADD, .src = src, .dst = dst, .bytes = n * sizeof(float)});
    }
    if (threads != 1 || (function != AWAITS && function != POSTS)) return INVALID_VALUE;
    touch(dst);
    if (function == AWAITS && src) {
        touch(src);
        given_at_once(2);
        int status = submit(handle, (work){.kind = WRITE, .dst = (void *)src, .ticket = n >> 32});
        if (status) return status;
    }
    return submit(handle, (work){.kind = function == AWAITS ? AWAIT : WRITE, .dst = dst, .ticket = n});
}

static int find_kernel(void **function, const void *module, const char *name) {
    const char *all[] = {ADDS, AWAITS, POSTS, FUSED_TEXT, LANES, PIECES_TEXT, RINGS};
    for (int i = 0; i < 7; i++)
        if (!strcmp(module, all[i])) {
            struct function *f = malloc(sizeof(*f));
            if (f) *f = (struct function){all[i], module, HIP}; /* HIP loads all of a module */
            *function = f;
            return strcmp(name, "ucch") ? INVALID_VALUE : f ? OK : OUT_OF_MEMORY;
        }
    return INVALID_VALUE;
}

int fakegpu_movers(void) { return __atomic_load_n(&movers, __ATOMIC_RELAXED); }

#ifdef FAKE_CUDA
#define RTC(name) nvrtc##name
#define RTC_CODE(more) nvrtcGetCUBIN##more
#else
#define RTC(name) hiprtc##name
#define RTC_CODE(more) hiprtcGetCode##more
#endif

int RTC(CreateProgram)(void **program, const char *source, const char *name, int n, const char **headers,
                       const char **as) {
    *program = strdup(source);
    return n;
}
int RTC(CompileProgram)(void *program, int n, const char **options) { return made_of(program) ? OK : INVALID_VALUE; }
int RTC(GetProgramLogSize)(void *program, size_t *bytes) {
    *bytes = 10;
    return OK;
}
int RTC(GetProgramLog)(void *program, char *text) {
    memcpy(text, "too hard!", 10);
    return OK;
}
int RTC_CODE(Size)(void *program, size_t *bytes) {
    *bytes = strlen(made_of(program)) + 1;
    return OK;
}
int RTC_CODE()(void *program, char *code) {
    strcpy(code, made_of(program));
    return OK;
}
int RTC(DestroyProgram)(void **program) {
    free(*program);
    return OK;
}
