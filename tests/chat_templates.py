"""Chat templates with the constructs of public models' templates, and a tokenizer for them."""

from bpe_files import keys_of

from zero_mpi.data import BPETokenizer
from zero_mpi.data.tokenizers.byte import byte_characters

CHATML = """\
{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA2 = """\
{% if messages[0]['role'] == 'system' %}
{% set turns = messages[1:] %}
{% set system = messages[0]['content'] %}
{% else %}
{% set turns = messages %}
{% set system = none %}
{% endif %}
{% for message in turns %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('user and assistant must take turns') }}
{% endif %}
{% if loop.first and system is not none %}
{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}
{% else %}
{% set content = message['content'] %}
{% endif %}
{% if message['role'] == 'user' %}
{{- bos_token + '[INST] ' + content.strip() + ' [/INST]' -}}
{% elif message['role'] == 'assistant' %}
{{- ' ' + content.strip() + ' ' + eos_token -}}
{% endif %}
{% endfor %}"""
LLAMA3 = """\
{{- bos_token }}
{%- if date_string is not defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now('%d %b %Y') %}
    {%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + date_string + '\\n' }}
{%- if messages[0].role == 'system' %}
    {{- messages[0].content | trim }}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- message.tool_calls[0].function | tojson }}
        {{- '<|eot_id|>' }}
        {%- continue %}
    {%- endif %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim }}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
MISTRAL = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in turns %}
    {%- if message['role'] == 'user' %}
        {%- if loop.last and system is defined %}
            {{- '[INST] ' + system + '\\n\\n' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + message['content'] + '[/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- else %}
        {{- raise_exception('user and assistant only, with one system message at first') }}
    {%- endif %}
{%- endfor %}
"""
GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no role of a system') }}{% endif %}
{% for message in messages %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
PHI3 = """\
{% for message in messages %}
{% if message['role'] in ['system', 'user'] %}
{{'<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n'}}
{%- elif message['role'] == 'assistant' %}
{{'<|assistant|>\\n' + message['content'] + '<|end|>\\n'}}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""
ZEPHYR = """\
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
QWEN3 = """\
{%- set ns = namespace(last=messages | length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- if ns.searching and message.role == 'user' %}
        {%- set ns.searching = false %}
        {%- set ns.last = messages | length - loop.index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {%- set thoughts = '' %}
        {%- if '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thoughts) %}
            {%- set content = '<think>\\n' + thoughts + '\\n</think>\\n\\n' + content %}
        {%- endif %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
PLAIN = """\
{% for message in messages %}
{{ '### ' + message['role'] }}:
{{ message['content'] }}

{% endfor %}
{% if add_generation_prompt %}
### assistant:
{% endif %}"""
# Templates in the style of trainers, which mark the assistant's text.
MARKED = """\
{% for message in messages %}
{% if message['role'] == 'assistant' %}
<|im_start|>assistant
{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}

{% else %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
TEMPLATES = {
    "chatml": CHATML,
    "llama 2": LLAMA2,
    "llama 3": LLAMA3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "phi 3": PHI3,
    "zephyr": ZEPHYR,
    "qwen 3": QWEN3,
    "plain": PLAIN,
    "marked": MARKED,
}

# Templates with tools, in which calls have the formats of public templates.
HERMES = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- endif %}
    {{- '\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first)
        or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
LLAMA31 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- '}<|eot_id|>' }}
    {%- else %}
        {%- set role = 'ipython' if message.role == 'tool' else message.role %}
        {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
NEMO = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}
            {{- out[:-1] }}
            {%- if not call.id is defined or call.id | length != 9 %}
                {{- raise_exception('ids have 9 letters') }}
            {%- endif %}
            {{- ', "id": "' + call.id + '"}' }}
            {{- ', ' if not loop.last else ']' + eos_token }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
    {%- else %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- endif %}
{%- endfor %}"""
DEEPSEEK = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<|user|>' + message.content }}{%- endif %}
    {%- if message.role == 'system' %}{{- message.content }}{%- endif %}
    {%- if message.role == 'assistant' and message.content is none %}
        {{- '<|assistant|>' }}
        {%- for call in message.tool_calls %}
            {{- '<call>' + call.function.name + '\\n```json\\n' + call.function.arguments + '\\n```</call>' }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- '<|assistant|>' + message.content + eos_token }}
    {%- endif %}
    {%- if message.role == 'tool' %}{{- '<result>' + message.content + '</result>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
BOTH = HERMES.replace(
    "{{- tool_call.arguments | tojson }}",
    "{%- if tool_call.arguments is string %}{{- tool_call.arguments }}"
    "{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}",
)
ITEMS = HERMES.replace(
    "{{- tool_call.arguments | tojson }}",
    "{%- for name, value in tool_call.arguments | items %}{{- '<' + name + '>' }}"
    "{{- value if value is string else value | tojson }}{%- endfor %}",
)
NEEDS_TOOLS = HERMES.replace("{%- if tools %}", "{%- if tools | length %}")
CALLS_MARKED = HERMES.replace(
    "{{- '<|im_start|>' + message.role }}\n", "{{- '<|im_start|>' + message.role }}{% generation %}\n"
).replace(
    "{{- '<|im_end|>\\n' }}\n    {%- elif message.role == 'tool'",
    "{{- '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}\n    {%- elif message.role == 'tool'",
)
CALLING = {  # name -> (template, form of tool arguments that it expects: object, text, or unchanged)
    "hermes": (HERMES, dict),
    "llama 3.1": (LLAMA31, dict),
    "nemo": (NEMO, dict),
    "deepseek": (DEEPSEEK, str),
    "both": (BOTH, None),
    "items": (ITEMS, dict),
    "needs tools": (NEEDS_TOOLS, dict),
    "marked calls": (CALLS_MARKED, dict),
    "none": (CHATML, None),
    "qwen 3": (QWEN3, None),
}

CONTROL = ("<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>")
CONTROL += ("<|end_header_id|>", "[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>", "<|end|>")
CONTROL += ("<|user|>", "<|assistant|>", "<|system|>", "<|endoftext|>")


def chat_keys(template: str | None = None) -> dict[str, object]:
    """Return keys of a byte-level BPE that has the control tokens of all templates."""
    letters = byte_characters()
    merges = ["h e", "he l", "hel l", "hell o", "Ġ hello", "! Ċ", "Ċ Ċ", "Ġ [", "> Ċ", "Ã ©", "Ġ t", "Ġt h"]
    merges += ["Ġth e"]
    tokens = [*letters, *(merge.replace(" ", "") for merge in merges), *CONTROL]
    types = [1] * (len(tokens) - len(CONTROL)) + [3] * len(CONTROL)
    ids = {token: place for place, token in enumerate(tokens)}
    special = {"bos_token_id": ids["<s>"], "eos_token_id": ids["</s>"], "unknown_token_id": ids["<unk>"]}
    keys = keys_of(tokens, merges, pre="qwen2", types=types, add_bos_token=True, **special)
    return keys if template is None else keys | {"tokenizer.chat_template": template}


def chat_tokenizer(template: str | None = None) -> BPETokenizer:
    return BPETokenizer(chat_keys(template))
