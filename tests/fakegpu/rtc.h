/* The run-time compiler of either vendor: it knows how to add floats; everything else is too hard for it. Included by
 * fakegpu.c. */
static const char ADDS[] = "adds floats";

static int compiles(const char *source) {
    return strstr(source, "const float *src, float *dst") && strstr(source, "(a + b)") ? OK : INVALID_VALUE;
}

static int launch_kernel(void *function, void **arguments, void *handle) {
    if (usable() || function != (void *)ADDS)
        return usable() ? usable() : INVALID_VALUE;
    size_t bytes = *(uint64_t *)arguments[2] * sizeof(float);
    return submit(handle,
                  (work){.kind = ADD, .src = *(void **)arguments[0], .dst = *(void **)arguments[1], .bytes = bytes});
}

static int find_kernel(void **function, const void *module, const char *name) {
    *function = (void *)ADDS;
    return strcmp(module, ADDS) || strcmp(name, "ucch") ? INVALID_VALUE : OK;
}

#ifdef FAKE_CUDA
#define RTC(name) nvrtc##name
#define RTC_CODE(more) nvrtcGetCUBIN##more
#else
#define RTC(name) hiprtc##name
#define RTC_CODE(more) hiprtcGetCode##more
#endif

int RTC(CreateProgram)(void **program, const char *source, const char *name, int n, const char **headers,
                       const char **as) {
    (void)name, (void)headers, (void)as;
    *program = strdup(source);
    return n;
}
int RTC(CompileProgram)(void *program, int n, const char **options) {
    (void)n, (void)options;
    return compiles(program);
}
int RTC(GetProgramLogSize)(void *program, size_t *bytes) {
    (void)program;
    *bytes = 10;
    return OK;
}
int RTC(GetProgramLog)(void *program, char *text) {
    (void)program;
    memcpy(text, "too hard!", 10);
    return OK;
}
int RTC_CODE(Size)(void *program, size_t *bytes) {
    (void)program;
    *bytes = sizeof(ADDS);
    return OK;
}
int RTC_CODE()(void *program, char *code) {
    (void)program;
    memcpy(code, ADDS, sizeof(ADDS));
    return OK;
}
int RTC(DestroyProgram)(void **program) {
    free(*program);
    return OK;
}
