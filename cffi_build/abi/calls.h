/* The library functions as static functions of their own names, each going through a table that loader.c fills. */
#ifndef UCCH_CALLS_H
#define UCCH_CALLS_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "abi/ucc_api.h"
#include "abi/ucp_api.h"

#define UCCH_UCC_ABSENT (-2)     /* UCC_ERR_NOT_IMPLEMENTED */
#define UCCH_UCC_NO_MESSAGE (-6) /* UCC_ERR_NO_MESSAGE */
/* True if the pointer that libucp returned for a request is an error code. */
#define IS_STATUS(p) ((uintptr_t)(p) >= (uintptr_t)-100)

typedef struct ucch_symbols {
#define UCC_SYMBOL(ret, name, params, args, need) ret(*name) params;
#define UCP_SYMBOL(ret, name, params, args, need) ret(*name) params;
#include "abi/symbols.h"
} ucch_symbols;

/* loader.c */
int ucch_losses(void);
void ucch_endpoint_errors_tell(void (*function)(void));

extern ucch_symbols ucch_sym;

/* An absent optional function answers NOT_IMPLEMENTED; the required ones are there once a library is loaded, and
 * Python calls nothing before that. */
#define UCC_SYMBOL(ret, name, params, args, need)                                                                      \
    static inline ret name params { return (need) || ucch_sym.name ? ucch_sym.name args : (ret)UCCH_UCC_ABSENT; }
#define UCP_SYMBOL(ret, name, params, args, need)                                                                      \
    static inline ret name params { return ucch_sym.name args; }
#include "abi/symbols.h"

#endif
