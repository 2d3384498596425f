"""Chat templates in the shapes that families of models have."""

LLAMA3 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
  {%- set system = messages[0]['content'] | trim %}
  {%- set messages = messages[1:] %}
{%- else %}
  {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{{- 'Today: ' + strftime_now('%d %b %Y') + '\\n\\n' + system + '<|eot_id|>' }}
{%- for message in messages %}
  {%- if message.tool_calls is defined and message.tool_calls %}
    {%- set call = message.tool_calls[0].function %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
    {{- '{"name": "' + call.name + '", "parameters": ' }}
    {{- call.arguments | tojson }}
    {{- '}<|eot_id|>' }}
  {%- else %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

QWEN25 = """\
{%- if messages[0]['role'] != 'system' %}
  {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
  {{- '<|im_start|>' + message.role + '\\n' + message.content }}
  {{- '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# Looks for its own words in answers, and for tools' words in questions.
QWEN3 = """\
{%- if tools %}
  {{- '<|im_start|>system\\n# Tools\\n' }}
  {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
  {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
  {%- set index = (messages|length - 1) - loop.index0 %}
  {%- if not ns.found and message.role == 'user'
        and message.content is string
        and not (message.content.startswith('<tool_response>')
                 and message.content.endswith('</tool_response>')) %}
    {%- set ns.found = true %}
    {%- set ns.last = index %}
  {%- endif %}
{%- endfor %}
{%- for message in messages %}
  {%- if message.role == 'assistant' %}
    {%- set content, thought = message.content, '' %}
    {%- if '</think>' in content %}
      {%- set thought = content.split('</think>')[0].rstrip('\\n') %}
      {%- set thought = thought.split('<think>')[-1].lstrip('\\n') %}
      {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if loop.index0 > ns.last and thought %}
      {{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- content }}
    {%- for call in message.tool_calls or [] %}
      {{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
  {%- elif message.role == 'tool' %}
    {{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
    {{- '\\n</tool_response><|im_end|>\\n' }}
  {%- else %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {{- '<|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\\n' }}
  {%- if enable_thinking is defined and enable_thinking is false %}
    {{- '<think>\\n\\n</think>\\n\\n' }}
  {%- endif %}
{%- endif %}
"""

GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
  {{- raise_exception('System role not supported') }}
{%- endif %}
{%- for message in messages %}
  {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('Roles must alternate user/assistant') }}
  {%- endif %}
  {%- set role = 'model' if message['role'] == 'assistant' else 'user' %}
  {{- '<start_of_turn>' + role + '\\n' }}
  {%- if message['content'] is string %}
    {{- message['content'] | trim }}
  {%- else %}
    {%- for item in message['content'] %}
      {%- if item['type'] == 'text' %}{{- item['text'] | trim }}{%- endif %}
    {%- endfor %}
  {%- endif %}
  {{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""

MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
  {%- if message['role'] == 'user' %}
    {{- '[INST] ' + message['content'] + ' [/INST]' }}
  {%- elif message['role'] == 'assistant' %}
    {{- ' ' + message['content'].strip() + eos_token }}
  {%- else %}
    {{- raise_exception('Only user and assistant roles are supported!') }}
  {%- endif %}
{%- endfor %}
"""

# Makes special tokens of the roles.
PHI3 = """\
{% for message in messages %}
{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}
"""

ZEPHYR = """\
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{% generation %}
{{ '<|assistant|>\\n' + message['content'] + eos_token }}
{% endgeneration %}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}
"""

# By the tokenizers of tests/data/made.py that go with them.
ALL = {
  "llama3": (LLAMA3, "llama3"),
  "qwen2.5": (QWEN25, "qwen"),
  "qwen3": (QWEN3, "qwen"),
  "gemma": (GEMMA, "gemma"),
  "mistral": (MISTRAL, "mistral"),
  "mistral old": (MISTRAL, "llama2"),
  "phi3": (PHI3, "phi3"),
  "zephyr": (ZEPHYR, "llama2"),
}
