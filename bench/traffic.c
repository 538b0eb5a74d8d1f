/* The two ends of `bench/relay.py`: an inference server that costs next to nothing, and clients that measure.
 *
 *   traffic serve PORT COUNT GAP_MS
 *       OpenAI-compatible servers on COUNT ports from PORT on. A POST is answered at once with about 600 bytes of JSON,
 *       or, if its body has "stream":true, with "max_tokens" events of about 200 bytes, one each GAP_MS. Every event
 *       carries the clock, so that its way can be timed.
 *   traffic whole PORT CONNECTIONS WARM_S SECONDS BODY_BYTES
 *       Closed loop: every connection sends its next request when the last one is answered.
 *   traffic rate PORT CONNECTIONS WARM_S SECONDS BODY_BYTES PER_S
 *       Open loop: requests are due at a fixed rate, and their latency counts from when they were due.
 *   traffic stream PORT CONNECTIONS WARM_S EVENTS
 *       One stream a connection; starts are spread over WARM_S, every stream has EVENTS events.
 *
 * One thread, epoll, loopback alone. In C because both ends share one core with each other, which in Python they would
 * fill long before nginx fills another. Clients print one line of JSON; times in it are microseconds.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MOST 8192          /* connections of either end */
#define READ_BYTES 262144
#define SECOND 1000000000LL

static int poller;

static int64_t clock_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * SECOND + now.tv_nsec;
}

static void die(const char *what) {
    perror(what);
    exit(1);
}

static void *grown(void *block, size_t bytes) {
    block = realloc(block, bytes);
    if (!block) die("realloc");
    return block;
}

static void interest(int fd, int operation, uint32_t events, void *of) {
    struct epoll_event e = {.events = events, .data.ptr = of};
    if (epoll_ctl(poller, operation, fd, &e) < 0) die("epoll_ctl");
}

static void no_delay(int fd) {
    int yes = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
}

/* -- the server ---------------------------------------------------------------------------------------------------- */

typedef struct {
    int fd, listens;
    char *in;
    size_t have, room;
    long events_left;
    unsigned life; /* told apart from who had this place before */
} Served;

typedef struct {
    int64_t at;
    Served *to;
    unsigned life;
} Due; /* all gaps are equal, so a ring is in order of time */

static Due ring[2 * MOST];
static unsigned ring_first, ring_end;
static int64_t gap_ns;

static const char WHOLE[] =
    "{\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion\",\"created\":1700000000,\"model\":\"bench\",\"choices\":[{\"index\":0,"
    "\"finish_reason\":\"stop\",\"message\":{\"role\":\"assistant\",\"content\":\"Water that falls on one side of the ridge goes to the "
    "northern sea, and what falls a step beside it to the southern one; the ridge itself is bare rock, on which nothing grows "
    "and nobody lives. In spring the snow goes first on the southern side, the brooks rise within a day, and the mills below, "
    "which have stood still since November, are heard again from far away by all who live in the valley.\"}}],"
    "\"usage\":{\"prompt_tokens\":20,\"completion_tokens\":80,\"total_tokens\":100}}";
static const char MODELS[] = "{\"object\":\"list\",\"data\":[{\"id\":\"bench\",\"object\":\"model\",\"created\":0,\"owned_by\":\"bench\",\"max_model_len\":131072}]}";
static const char METRICS[] = "vllm:num_requests_running{model_name=\"bench\"} 0.0\nvllm:num_requests_waiting{model_name=\"bench\"} 0.0\n";
static const char EVENT[] =
    "data: {\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"bench\",\"choices\":[{\"index\":0,"
    "\"delta\":{\"content\":\"@%019lld of a word\"},\"finish_reason\":null}]}\n\n";

static void hang_up(Served *s) {
    close(s->fd);
    s->life++;
    s->have = 0;
    s->events_left = 0;
    s->fd = -1;
}

static int say(Served *s, const char *bytes, size_t n) {
    if (send(s->fd, bytes, n, MSG_NOSIGNAL) == (ssize_t)n) return 1;
    hang_up(s); /* whoever reads this slowly takes no part in what is measured here */
    return 0;
}

static int say_whole(Served *s, const char *type, const char *body) {
    char out[2048];
    int n = snprintf(out, sizeof out, "HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %zu\r\n\r\n%s", type, strlen(body), body);
    return say(s, out, n);
}

static int say_event(Served *s, int first) {
    char event[512], out[1024];
    int bytes = snprintf(event, sizeof event, EVENT, (long long)clock_ns()), n = 0;
    if (first) n = sprintf(out, "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n");
    n += sprintf(out + n, "%x\r\n%s\r\n", bytes, event);
    if (!--s->events_left) n += sprintf(out + n, "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n");
    return say(s, out, n);
}

static void later(Served *s, int64_t at) {
    ring[ring_end++ % (2 * MOST)] = (Due){at, s, s->life};
    if (ring_end - ring_first > 2 * MOST) die("too many streams");
}

static int answer(Served *s, const char *head, const char *body) {
    if (!strncmp(head, "POST", 4)) {
        if (!strstr(body, "\"stream\":true")) return say_whole(s, "application/json", WHOLE);
        const char *most = strstr(body, "_tokens\":"); /* max_tokens, or max_completion_tokens, as some rewrite it */
        s->events_left = most ? atol(most + 9) : 1;
        int64_t now = clock_ns();
        if (!say_event(s, 1)) return 0;
        if (s->events_left) later(s, now + gap_ns);
        return 1;
    }
    if (!strncmp(head, "GET /v1/models", 14)) return say_whole(s, "application/json", MODELS);
    if (!strncmp(head, "GET /metrics", 12)) return say_whole(s, "text/plain; version=0.0.4", METRICS);
    if (strstr(head, "info") || !strncmp(head, "GET /version", 12)) return say_whole(s, "application/json", "{\"model_path\":\"bench\",\"version\":\"0.0.0\"}");
    return say_whole(s, "text/plain", "ok");
}

static void read_requests(Served *s) {
    for (;;) {
        if (s->room - s->have < READ_BYTES / 4) s->in = grown(s->in, (s->room = s->room * 2 + READ_BYTES / 2) + 1);
        ssize_t n = recv(s->fd, s->in + s->have, s->room - s->have, 0);
        if (n < 0 && errno == EAGAIN) return;
        if (n <= 0) { hang_up(s); return; }
        s->have += n;
        s->in[s->have] = 0;
        for (;;) {
            char *end = s->have ? strstr(s->in, "\r\n\r\n") : NULL;
            if (!end) break;
            end[2] = 0;
            char *length = strcasestr(s->in, "\r\ncontent-length:");
            end[2] = '\r';
            size_t whole = end + 4 - s->in + (length ? strtoul(length + 17, NULL, 10) : 0);
            if (s->have < whole) break;
            char after = s->in[whole];
            s->in[whole] = 0;
            int alive = answer(s, s->in, end + 4);
            if (!alive) return;
            s->in[whole] = after;
            s->have -= whole;
            memmove(s->in, s->in + whole, s->have + 1);
        }
    }
}

static void serve(int port, int count) {
    Served *all = calloc(MOST, sizeof *all);
    for (int i = 0; i < MOST; i++) all[i].fd = -1;
    for (int i = 0; i < count; i++) {
        int yes = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
        struct sockaddr_in here = {.sin_family = AF_INET, .sin_port = htons(port + i), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
        if (bind(fd, (void *)&here, sizeof here) || listen(fd, 4096)) die("listen");
        all[i] = (Served){.fd = fd, .listens = 1};
        interest(fd, EPOLL_CTL_ADD, EPOLLIN, &all[i]);
    }
    struct epoll_event ready[512];
    for (;;) {
        int64_t now = clock_ns();
        while (ring_first != ring_end && ring[ring_first % (2 * MOST)].at <= now) {
            Due due = ring[ring_first++ % (2 * MOST)];
            if (due.to->life == due.life && say_event(due.to, 0) && due.to->events_left) later(due.to, due.at + gap_ns);
        }
        int64_t wait = ring_first == ring_end ? SECOND : ring[ring_first % (2 * MOST)].at - clock_ns();
        struct timespec patience = {wait > 0 ? wait / SECOND : 0, wait > 0 ? wait % SECOND : 0};
        int n = epoll_pwait2(poller, ready, 512, &patience, NULL);
        for (int i = 0; i < n; i++) {
            Served *s = ready[i].data.ptr;
            if (!s->listens) {
                if (s->fd >= 0) read_requests(s);
                continue;
            }
            for (int fd; (fd = accept4(s->fd, NULL, NULL, SOCK_NONBLOCK)) >= 0;) {
                Served *place = all + count;
                while (place < all + MOST && place->fd >= 0) place++;
                if (place == all + MOST) die("too many connections");
                no_delay(fd);
                place->fd = fd;
                interest(fd, EPOLL_CTL_ADD, EPOLLIN, place);
            }
        }
    }
}

/* -- the clients --------------------------------------------------------------------------------------------------- */

typedef struct {
    uint32_t *tenths; /* of a microsecond */
    size_t n, room;
} Sample;

typedef struct {
    int fd;
    enum { IDLE, SENDING, HEAD, BODY } state;
    size_t sent, in_head;
    int64_t began, last;
    int status, chunked, closes;
    long left;         /* bytes of a body of known length, or of the present chunk */
    enum { SIZE, DATA, END } part;
    char size[16], line[1024];
    int in_size, in_line;
    long events;
    char head[4096];
} Client;

static Client *clients;
static int client_count, streaming;
static struct sockaddr_in target;
static char *request;
static size_t request_bytes;
static Sample latency, first_event, event_delay;
static long answered, answered_all, failed, events_all, streams_whole, streams_begun, events_wanted;
static int64_t began_at, counted_from, counted_until;
static long busy;

static void take(Sample *s, int64_t ns) {
    if (s->n == s->room) s->tenths = grown(s->tenths, (s->room = s->room * 2 + 4096) * sizeof *s->tenths);
    s->tenths[s->n++] = ns < 0 ? 0 : ns / 100;
}

static int by_size(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static void print_sample(const char *name, Sample *s) {
    qsort(s->tenths, s->n, sizeof *s->tenths, by_size);
    double p50 = s->n ? s->tenths[s->n / 2] / 10.0 : 0, p99 = s->n ? s->tenths[s->n * 99 / 100] / 10.0 : 0;
    printf("\"%s_p50\": %.1f, \"%s_p99\": %.1f, ", name, p50, name, p99);
}

static void close_client(Client *c) {
    if (c->fd >= 0) close(c->fd);
    c->fd = -1;
}

static void give_up(Client *c) {
    failed++;
    busy--;
    close_client(c);
    c->state = IDLE;
}

static void send_rest(Client *c) {
    while (c->sent < request_bytes) {
        ssize_t n = send(c->fd, request + c->sent, request_bytes - c->sent, MSG_NOSIGNAL);
        if (n < 0 && (errno == EAGAIN || errno == ENOTCONN)) {
            interest(c->fd, EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT, c);
            return;
        }
        if (n < 0) { give_up(c); return; }
        c->sent += n;
    }
    c->state = HEAD;
}

static void begin(Client *c, int64_t due) {
    busy++;
    c->state = SENDING;
    c->began = due;
    c->sent = c->in_head = 0;
    c->in_size = c->in_line = 0;
    c->events = 0;
    c->last = 0;
    if (c->fd < 0) {
        c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
        if (c->fd < 0) die("socket");
        no_delay(c->fd);
        connect(c->fd, (void *)&target, sizeof target);
        interest(c->fd, EPOLL_CTL_ADD, EPOLLIN | EPOLLOUT, c);
        return;
    }
    send_rest(c);
}

static void finish(Client *c, int64_t now) {
    busy--;
    c->state = IDLE;
    if (c->status != 200) failed++;
    else {
        answered_all++;
        if (streaming) streams_whole += c->events == events_wanted;
        else if (c->began >= counted_from && now <= counted_until) {
            answered++;
            take(&latency, now - c->began);
        }
    }
    if (c->closes) close_client(c);
}

static void read_line(Client *c, int64_t now) {
    c->line[c->in_line] = 0;
    char *stamp = strstr(c->line, "\"@");
    c->in_line = 0;
    if (!stamp) return;
    events_all++;
    if (!c->events++) take(&first_event, now - c->began);
    take(&event_delay, now - strtoll(stamp + 2, NULL, 10));
}

static void read_events(Client *c, const char *bytes, size_t n, int64_t now) {
    while (n) {
        const char *newline = memchr(bytes, '\n', n);
        size_t take_n = newline ? (size_t)(newline - bytes) : n;
        if (c->in_line + take_n < sizeof c->line) {
            memcpy(c->line + c->in_line, bytes, take_n);
            c->in_line += take_n;
        }
        if (!newline) return;
        read_line(c, now);
        bytes += take_n + 1;
        n -= take_n + 1;
    }
}

/* Whether the answer is whole. */
static int read_body(Client *c, const char *bytes, size_t n, int64_t now) {
    if (!c->chunked) return (c->left -= n) <= 0;
    while (n) {
        if (c->part == SIZE) {
            char one = *bytes++;
            n--;
            if (one != '\n') {
                if (one != '\r' && c->in_size < 15) c->size[c->in_size++] = one;
                continue;
            }
            c->size[c->in_size] = 0;
            c->in_size = 0;
            c->left = strtol(c->size, NULL, 16);
            c->part = c->left ? DATA : END;
            if (!c->left) c->left = -1; /* the last one: what follows its end is the end of all */
        } else if (c->part == DATA) {
            size_t part = n < (size_t)c->left ? n : (size_t)c->left;
            if (streaming) read_events(c, bytes, part, now);
            bytes += part;
            n -= part;
            if (!(c->left -= part)) c->part = END;
        } else {
            char one = *bytes++;
            n--;
            if (one != '\n') continue;
            if (c->left < 0) return 1;
            c->part = SIZE;
        }
    }
    return 0;
}

static void read_answer(Client *c) {
    static char in[READ_BYTES];
    for (;;) {
        ssize_t got = recv(c->fd, in, sizeof in, 0);
        if (got < 0 && errno == EAGAIN) return;
        if (got <= 0) {
            if (c->state == IDLE) close_client(c);
            else give_up(c);
            return;
        }
        int64_t now = clock_ns();
        char *bytes = in;
        size_t n = got;
        if (c->state == SENDING) c->state = HEAD;
        if (c->state == HEAD) {
            size_t before = c->in_head, part = sizeof c->head - 1 - before;
            if (part > n) part = n;
            memcpy(c->head + before, bytes, part);
            c->in_head += part;
            c->head[c->in_head] = 0;
            char *end = strstr(c->head, "\r\n\r\n");
            if (!end) {
                if (c->in_head == sizeof c->head - 1) { give_up(c); return; }
                continue;
            }
            size_t head = end + 4 - c->head;
            end[2] = 0;
            c->status = atoi(c->head + 9);
            char *length = strcasestr(c->head, "\r\ncontent-length:");
            c->chunked = strcasestr(c->head, "\r\ntransfer-encoding:") != NULL;
            c->closes = strcasestr(c->head, "\r\nconnection: close") != NULL;
            c->left = length ? atol(length + 17) : 0;
            c->part = SIZE;
            c->state = BODY;
            bytes += head - before;
            n -= head - before;
            if (!c->chunked && !c->left) { finish(c, now); return; }
        }
        if (c->state == BODY && n && read_body(c, bytes, n, now)) { finish(c, now); return; }
    }
}

static void make_request(int port, size_t body_bytes, long events) {
    char *body = calloc(1, body_bytes + 512);
    size_t n = sprintf(body, "{\"model\":\"bench\",\"stream\":%s,\"max_tokens\":%ld,\"messages\":[{\"role\":\"user\",\"content\":\"", events ? "true" : "false", events ? events : 100);
    for (size_t i = 0; n + 4 < body_bytes; i++) body[n++] = i % 7 ? 'a' + i % 23 : ' ';
    n += sprintf(body + n, "\"}]}");
    request = calloc(1, n + 512);
    request_bytes = sprintf(request,
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nUser-Agent: bench\r\nAuthorization: Bearer key\r\n"
        "Content-Type: application/json\r\nAccept: application/json\r\nContent-Length: %zu\r\n\r\n", port, n);
    memcpy(request + request_bytes, body, n);
    request_bytes += n;
}

static void load(const char *mode, int port, double warm_s, double seconds, double per_s) {
    int open_loop = !strcmp(mode, "rate");
    began_at = clock_ns();
    counted_from = began_at + warm_s * SECOND;
    counted_until = counted_from + seconds * SECOND;
    int64_t end = streaming ? counted_until : counted_until + 5 * SECOND;
    long issued = 0;
    target = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    clients = calloc(client_count, sizeof *clients);
    for (int i = 0; i < client_count; i++) clients[i].fd = -1;
    struct epoll_event ready[512];
    for (;;) {
        int64_t now = clock_ns(), wake = now + SECOND / 500;
        if (now >= end || (streaming ? streams_begun == client_count && !busy : now >= counted_until && !busy)) break;
        if (streaming) { /* the k-th begins at its time, each once */
            while (streams_begun < client_count && now >= began_at + (int64_t)(warm_s * SECOND * streams_begun / client_count))
                begin(&clients[streams_begun++], now);
        } else if (now < counted_until) {
            for (int i = 0; i < client_count; i++) {
                int64_t due = open_loop ? began_at + (int64_t)(issued * (double)SECOND / per_s) : now;
                if (due > now) { if (due < wake) wake = due; break; }
                if (clients[i].state != IDLE) continue;
                issued++;
                begin(&clients[i], due);
            }
        }
        int64_t wait = wake - clock_ns();
        struct timespec patience = {0, wait > 0 ? wait : 0};
        int n = epoll_pwait2(poller, ready, 512, &patience, NULL);
        for (int i = 0; i < n; i++) {
            Client *c = ready[i].data.ptr;
            if (c->fd >= 0 && c->state == SENDING && ready[i].events & EPOLLOUT) {
                send_rest(c);
                if (c->state == HEAD) interest(c->fd, EPOLL_CTL_MOD, EPOLLIN, c);
            }
            if (c->fd >= 0 && ready[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) read_answer(c);
            if (!streaming && !open_loop && c->state == IDLE && c->fd >= 0 && clock_ns() < counted_until) begin(c, clock_ns());
        }
    }
    failed += busy;
    printf("{");
    print_sample("latency", &latency);
    print_sample("first", &first_event);
    print_sample("delay", &event_delay);
    printf("\"answered\": %ld, \"all\": %ld, \"failed\": %ld, \"events\": %ld, \"missing\": %ld, \"seconds\": %.3f}\n", answered, answered_all, failed,
           events_all, streaming ? events_wanted * client_count - events_all : 0, (clock_ns() - began_at) / 1e9);
}

int main(int argc, char **argv) {
    signal(SIGPIPE, SIG_IGN);
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    poller = epoll_create1(0);
    const char *mode = argc > 1 ? argv[1] : "";
    if (!strcmp(mode, "serve") && argc == 5) {
        gap_ns = atof(argv[4]) * 1e6;
        serve(atoi(argv[2]), atoi(argv[3]));
    }
    streaming = !strcmp(mode, "stream");
    int wanted = streaming ? 6 : !strcmp(mode, "whole") ? 7 : !strcmp(mode, "rate") ? 8 : -1;
    if (argc != wanted) {
        fprintf(stderr, "see the head of traffic.c\n");
        return 2;
    }
    int port = atoi(argv[2]);
    client_count = atoi(argv[3]);
    if (client_count < 1 || client_count > MOST / 2) die("connections");
    events_wanted = streaming ? atol(argv[5]) : 0;
    make_request(port, streaming ? 400 : strtoul(argv[6], NULL, 10), events_wanted);
    load(mode, port, atof(argv[4]), streaming ? events_wanted * 0.1 + 10 : atof(argv[5]), wanted == 8 ? atof(argv[7]) : 0);
    return 0;
}
