/* Functions of other libraries that are replaced where some libraries call them: there, the relocated addresses are
 * overwritten.
 *
 * A workaround for libucc's TL/UCP (UCC 1.4.0): after an endpoint error it passes the error code that a send or receive
 * returned to ucp_request_cancel and ucp_request_free, and libucp would use it as an address. The wrappers check for
 * error codes.
 *
 * mpi4py calls MPI_Finalize when Python ends, also in a forked child, where Open MPI waits for its parent's threads. */
#include <elf.h>
#include <link.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "abi/calls.h"
#include "api/api.h"

#if defined(__x86_64__)
#define IS_ADDRESS(type) ((type) == R_X86_64_JUMP_SLOT || (type) == R_X86_64_GLOB_DAT || (type) == R_X86_64_64)
#elif defined(__aarch64__)
#define IS_ADDRESS(type) ((type) == R_AARCH64_JUMP_SLOT || (type) == R_AARCH64_GLOB_DAT || (type) == R_AARCH64_ABS64)
#else
#define IS_ADDRESS(type) 0
#define UNKNOWN_MACHINE
#endif

static int errors;
static void (*on_error)(void);

/* Called during libucc's progress, before the failed task goes on without its data. */
static void count_error(void) {
    __atomic_add_fetch(&errors, 1, __ATOMIC_RELAXED);
    if (on_error) on_error();
}

static void cancel(ucp_worker_h worker, void *request) {
    if (request && !IS_STATUS(request))
        ucp_request_cancel(worker, request);
    else
        count_error();
}

/* Counts failed requests, too: libucc 1.4.0 may report success for the collective that they are part of. */
static void free_request(void *request) {
    if (!request || IS_STATUS(request)) return;
    int status = ucp_request_check_status(request);
    if (status < 0 && status != UCS_ERR_CANCELED) count_error();
    ucp_request_free(request);
}

static int finalize_nothing(void) { return 0; }

/* Replaced functions, and the beginning of the name of the libraries that call them: all plugins TL/UCP, and mpi4py. */
static const struct {
    const char *library, *name;
    void *by;
} replaced[] = {{"libucc_tl_ucp", "ucp_request_cancel", cancel},
                {"libucc_tl_ucp", "ucp_request_free", free_request},
                {"MPI.", "MPI_Finalize", finalize_nothing}};

static void *replacement_of(const char *library, const char *name) {
    void *found = NULL;
    for (size_t i = 0; i < sizeof(replaced) / sizeof(*replaced); i++)
        if (!strcmp(library, replaced[i].library) && !strcmp(name, replaced[i].name)) found = replaced[i].by;
    return found;
}

/* Number of libucc's operations in this process that ended with an endpoint error. */
int ucch_endpoint_errors(void) { return __atomic_load_n(&errors, __ATOMIC_RELAXED); }

/* Set a function to call at each such error. Under the lock. */
void ucch_endpoint_errors_tell(void (*function)(void)) { on_error = function; }

/* Depending on the dynamic linker, entries of the dynamic section are offsets or absolute addresses. */
static const void *address(const struct dl_phdr_info *info, ElfW(Addr) at) {
    return (const void *)(at < info->dlpi_addr ? info->dlpi_addr + at : at);
}

static const ElfW(Phdr) * header_of(const struct dl_phdr_info *info, ElfW(Word) type) {
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == type) return &info->dlpi_phdr[i];
    return NULL;
}

/* Value of an entry of the library's dynamic section; 0: none. */
static ElfW(Addr) dynamic_value(const struct dl_phdr_info *info, ElfW(Sxword) tag) {
    const ElfW(Phdr) *dynamic = header_of(info, PT_DYNAMIC);
    const ElfW(Dyn) *d = dynamic ? (const ElfW(Dyn) *)(info->dlpi_addr + dynamic->p_vaddr) : NULL;
    while (d && d->d_tag != DT_NULL && d->d_tag != tag)
        d++;
    return d && d->d_tag == tag ? d->d_un.d_val : 0;
}

/* Write into a relocated address; its page may be read-only since relocation (RELRO). The dynamic linker leaves the
 * last page writable if the range ends within it, as variables may follow: so in a library for smaller pages than the
 * system's. */
static int write_at(const struct dl_phdr_info *info, void **at, void *what) {
    const ElfW(Phdr) *closed = header_of(info, PT_GNU_RELRO);
    size_t bytes = (size_t)getpagesize();
    ElfW(Addr) from = closed ? info->dlpi_addr + closed->p_vaddr : 0, where = (ElfW(Addr))at, page = where & -bytes;
    int is_closed = closed && where >= from && page < ((from + closed->p_memsz) & -bytes);
    if (is_closed && mprotect((void *)page, bytes, PROT_READ | PROT_WRITE)) return -1;
    __atomic_store_n(at, what, __ATOMIC_RELEASE);
    if (is_closed) mprotect((void *)page, bytes, PROT_READ);
    return 0;
}

/* Redirect the calls of one library. Returns 0, or -1 if one cannot be redirected. */
static int redirect(const struct dl_phdr_info *info, const char *library) {
    static const ElfW(Sxword) tables[][2] = {{DT_JMPREL, DT_PLTRELSZ}, {DT_RELA, DT_RELASZ}};
    const ElfW(Sym) *symbols = address(info, dynamic_value(info, DT_SYMTAB));
    const char *strings = address(info, dynamic_value(info, DT_STRTAB));
    for (int k = 0; k < 2; k++) {
        const ElfW(Rela) *each = address(info, dynamic_value(info, tables[k][0]));
        for (size_t left = dynamic_value(info, tables[k][1]) / sizeof(*each); left; left--, each++) {
            void *what = NULL;
            if (IS_ADDRESS(ELF64_R_TYPE(each->r_info)))
                what = replacement_of(library, strings + symbols[ELF64_R_SYM(each->r_info)].st_name);
            if (what && write_at(info, (void **)(info->dlpi_addr + each->r_offset), what)) return -1;
        }
    }
    return 0;
}

static int visit(struct dl_phdr_info *info, size_t size, void *library) {
    const char *slash = strrchr(info->dlpi_name, '/'), *name = slash ? slash + 1 : info->dlpi_name;
    return strncmp(name, library, strlen(library)) ? 0 : redirect(info, library);
}

/* Redirect the calls of all such libraries loaded so far. Returns 0, or -1 if that is not possible. */
static int redirect_all(char *library) {
#ifdef UNKNOWN_MACHINE
    return -1;
#else
    return dl_iterate_phdr(visit, library);
#endif
}

/* Of all TL/UCP plugins. */
int ucch_guard_cancel(void) { return redirect_all("libucc_tl_ucp"); }

/* Of mpi4py. By a forked child that ends. */
int ucch_guard_finalize(void) { return redirect_all("MPI."); }
