-- One balancer settles what one tenant has used and takes what it wants: `QuotaCall` in, `QuotaReply` out, both JSON.
-- The windows are those of common/policy/window.py, by the clock of this server. All keys share one hash tag.
--
-- KEYS  1, 2 windows of requests and of tokens: hash of bucket -> units, "used", "oldest"
--       3    places for requests under way: hash of balancer -> "held expires_ms"
--       4    the month: hash of "tokens", "micro_usd"
--       5    what was settled last: hash of balancer -> number
-- ARGV  1    the call    2, 3 width of a bucket in us, and how many count beside the present one    4 lease kept back

local call = cjson.decode(ARGV[1])
local width, buckets, kept_back = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local current = math.floor(now / width)
local first = current - buckets
local none = cjson.null

local function int(number)
  return string.format('%.0f', number)
end

local fresh = tonumber(redis.call('HGET', KEYS[5], call.balancer) or 0) < call.settles

local function open(key) -- drop what no longer counts
  local head = redis.call('HMGET', key, 'used', 'oldest')
  local used, oldest = tonumber(head[1] or 0), tonumber(head[2] or current)
  if oldest < first then
    local names = {}
    for bucket = oldest, math.min(first - 1, oldest + buckets) do
      names[#names + 1] = int(bucket)
    end
    for _, count in ipairs(redis.call('HMGET', key, unpack(names))) do
      used = used - tonumber(count or 0)
    end
    redis.call('HDEL', key, unpack(names))
    oldest = first
  end
  return {key = key, used = used, oldest = oldest}
end

local function add(window, bucket, amount)
  if amount ~= 0 then
    redis.call('HINCRBY', window.key, int(bucket), int(amount))
    window.used = window.used + amount
  end
end

local function settle(window, wanted)
  add(window, current, wanted.charge)
  for _, draw in ipairs(wanted.returned) do
    if draw[1] >= first then
      local there = tonumber(redis.call('HGET', window.key, int(draw[1])) or 0)
      add(window, draw[1], -math.min(there, draw[2]))
    end
  end
end

local function amount_of(free, least, most) -- as granted() in window.py
  if free < least then
    return -1
  end
  return least + math.max(0, math.min(most - least, math.floor((free - least) / kept_back)))
end

local function wait_of(window, wanted) -- seconds until the least would fit; "never" is -1
  local too_many = window.used + wanted.least - wanted.limit
  if too_many <= 0 then
    return 0
  end
  if wanted.least > wanted.limit then
    return -1
  end
  local names = {}
  for bucket = window.oldest, current do
    names[#names + 1] = int(bucket)
  end
  for at, count in ipairs(redis.call('HMGET', window.key, unpack(names))) do
    too_many = too_many - tonumber(count or 0)
    if too_many <= 0 then
      return ((window.oldest + at - 1 + buckets + 1) * width - now) / 1000000
    end
  end
  return -1
end

local windows, allowed = {}, true
for at, name in ipairs({'requests', 'tokens'}) do
  local wanted = call[name]
  if wanted ~= none then
    local window = open(KEYS[at])
    if fresh then
      settle(window, wanted)
    end
    window.amount = amount_of(wanted.limit - window.used, wanted.least, wanted.most)
    allowed = allowed and window.amount >= wanted.least
    windows[name] = window
  end
end

local slots, free_slots = call.slots, 0
if slots ~= none then
  local now_ms, held = now / 1000, redis.call('HGETALL', KEYS[3])
  free_slots = slots.limit
  for at = 1, #held, 2 do
    local count, expires = string.match(held[at + 1], '(%d+) (%d+)')
    if tonumber(expires) <= now_ms then
      redis.call('HDEL', KEYS[3], held[at])
    elseif held[at] ~= call.balancer then
      free_slots = free_slots - count
    end
  end
  allowed = allowed and free_slots >= slots.least
end

local reply = {slots = 0}
for name, window in pairs(windows) do
  local wanted, amount, wait = call[name], 0, 0
  if allowed and window.amount > 0 then
    amount = window.amount
    add(window, current, amount)
  elseif window.amount < wanted.least then
    wait = wait_of(window, wanted)
  end
  redis.call('HSET', window.key, 'used', int(window.used), 'oldest', int(window.oldest))
  redis.call('PEXPIRE', window.key, int(math.ceil((buckets + 2) * width / 1000)))
  reply[name] = {amount, current, window.used, wait}
end

if slots ~= none then
  local held = slots.in_use
  if allowed then
    held = math.max(held, amount_of(free_slots, slots.least, slots.most))
  end
  if held > 0 then
    redis.call('HSET', KEYS[3], call.balancer, int(held) .. ' ' .. int(now / 1000 + slots.ttl_s * 1000))
    redis.call('PEXPIRE', KEYS[3], int(math.max(slots.ttl_s * 1000, redis.call('PTTL', KEYS[3]))))
  else
    redis.call('HDEL', KEYS[3], call.balancer)
  end
  reply.slots = held
end

if fresh and (call.tokens_spent > 0 or call.micro_usd_spent > 0) then
  redis.call('HINCRBY', KEYS[4], 'tokens', int(call.tokens_spent))
  redis.call('HINCRBY', KEYS[4], 'micro_usd', int(call.micro_usd_spent))
  redis.call('EXPIRE', KEYS[4], 93 * 86400) -- the month and two more
end
if fresh then
  redis.call('HSET', KEYS[5], call.balancer, int(call.settles))
  redis.call('EXPIRE', KEYS[5], 86400) -- longer than any call is tried again
end
local month = redis.call('HMGET', KEYS[4], 'tokens', 'micro_usd')
reply.month_tokens, reply.month_micro_usd = tonumber(month[1] or 0), tonumber(month[2] or 0)
return cjson.encode(reply)
