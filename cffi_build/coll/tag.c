/* Tags of collectives between hosts.
 *
 * libucc matches messages by a collective's number alone: ranks of two hosts that call different things would take each
 * other's data for their own. So calls on a team of several hosts have tags of ours: the number, and above its lowest
 * bits the call's salt. Collectives whose tags are equal by chance are not in flight at the same time: what one that
 * has ended here has sent is before what the next one sends. */
#include <stdlib.h>

#include "coll/program.h"
#define TAG_BITS 15
#define NUMBER_BITS (TAG_BITS - SALT_BITS)

/* The team's ranks are on several hosts; nothing was posted on it. 0, or a failure. */
int ucch_team_far(ucch_team *team) {
    team->tags = calloc((1 << TAG_BITS) / 64, sizeof(uint64_t));
    return team->tags ? 0 : UCCH_FAIL_MEMORY;
}

static uint16_t tag_of(const ucch_step *s) {
    uint32_t next = (s->is.team->number ^ s->program->salt << NUMBER_BITS) % (1 << TAG_BITS);
    return s->request ? s->args.tag : (uint16_t)next;
}

static int is_tagged(const ucch_step *s) { return s->is.team->tags && !s->program->on_device; }

/* True if the tag of a collective that is to be posted is free. */
int ucch_tag_is_free_locked(const ucch_step *s) {
    return !is_tagged(s) || !(s->is.team->tags[tag_of(s) / 64] >> tag_of(s) % 64 & 1);
}

/* Give a collective that is being made its tag. */
void ucch_tag_give_locked(ucch_step *s) {
    if (!is_tagged(s)) return;
    s->args.tag = tag_of(s);
    s->args.mask |= MASK_TAG;
    s->is.team->number++;
}

/* A collective's tag is in use, or no longer. */
void ucch_tag_hold_locked(const ucch_step *s, int held) {
    if (!is_tagged(s)) return;
    uint64_t *word = &s->is.team->tags[s->args.tag / 64], bit = (uint64_t)1 << s->args.tag % 64;
    *word = held ? *word | bit : *word & ~bit;
}
