/* What must not be done: it reads a handle's text after the handle was given back. Whoever looks for such mistakes has to find this one. */
#include "check.h"

int main(void) {
    weft_agent *agent = start("mistaken", NULL, NULL);
    const char *name = weft_agent_name(agent);
    weft_agent_free(agent);
    /* Where nobody looks, it is any number. */
    return strlen(name) > 1000;
}
