/* Messages that came before their receivers, in order of arrival. The list's owner has the lock for it. */
#include <stdlib.h>
#include <string.h>

#include "base/base.h"

struct ucch_early {
    ucch_packet message; /* first: it is freed by its address */
    uint64_t id;
    ucch_early *next;
    char copy[];
};

/* Keep a message for receiver `id`, with a copy of its data unless it is still at the sender. Returns 1, or 0 if there
 * is no memory, or the list holds `most` messages. */
int ucch_early_keep(ucch_early **first, uint64_t id, const ucch_packet *m, int most) {
    size_t bytes = m->is_later ? 0 : m->bytes;
    ucch_early **last = first;
    for (; *last && most > 0; most--)
        last = &(*last)->next;
    ucch_early *kept = most > 0 ? malloc(sizeof(*kept) + m->header_bytes + bytes) : NULL;
    if (!kept) return 0;
    *kept = (ucch_early){.message = *m, .id = id};
    kept->message.header = memcpy(kept->copy, m->header, m->header_bytes);
    if (!m->is_later) kept->message.data = kept->copy + m->header_bytes;
    if (bytes) memcpy(kept->message.data, m->data, bytes);
    *last = kept;
    return 1;
}

/* Take the oldest message for a receiver off the list; the caller frees it. NULL if there is none. */
ucch_packet *ucch_early_take(ucch_early **first, uint64_t id) {
    ucch_early *l = *first;
    while (l && l->id != id)
        l = l->next;
    if (!l) return NULL;
    UCCH_UNLINK(*first, l, next);
    return &l->message;
}

/* Drop the messages for receivers whose ids are lower. */
void ucch_early_drop(ucch_early **first, uint64_t below) {
    for (ucch_early **at = first, *l; (l = *at);)
        if (l->id < below) {
            *at = l->next;
            free(l);
        } else {
            at = &l->next;
        }
}
