/* Trains from a file of arguments, for processors that Python does not run on; tests/native/test_processors.py. */
#include "train.c"
#include <stdio.h>
#include <stdlib.h>

static void *next(FILE *file) {
    int64_t size = 0;
    if (fread(&size, sizeof size, 1, file) != 1) exit(2);
    char *content = aligned_alloc(64, ((size_t)size + 63) / 64 * 64);
    if (fread(content, 1, (size_t)size, file) != (size_t)size) exit(3);
    return content;
}

int main(int count, char **names) {
    FILE *file = count == 3 ? fopen(names[1], "rb") : NULL, *out = count == 3 ? fopen(names[2], "wb") : NULL;
    if (!file || !out) return 1;
    Net *net = next(file);
    net->layers = next(file);
    const Descent *descent = next(file);
    const float *x = next(file);
    const int64_t *y = next(file), *index = next(file), *sizes = next(file);
    const float *received = next(file);
    float *upload = malloc(sizeof(float) * (size_t)net->num_parameters);
    char *scratch = aligned_alloc(64, fedhist_scratch(net, sizes[0], SGD));
    fedhist_train(net, descent, x, y, index, sizes, 2, received, NULL, upload, scratch);
    return fwrite(upload, sizeof(float), (size_t)net->num_parameters, out) != (size_t)net->num_parameters;
}
